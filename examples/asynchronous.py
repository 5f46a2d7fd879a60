"""Many requests at a time. The client tries a full server (429) again by itself; other errors say what is wrong."""

import asyncio
import os

import openai

QUESTIONS = ["What is rain?", "What is a comet?", "What is a prime number?", "What is rust?"]


async def main() -> None:
    async with openai.AsyncOpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        max_retries=5,
    ) as client:
        model = (await client.models.list()).data[0].id

        async def ask(question: str) -> str:
            made = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": question}], max_tokens=24
            )
            return made.choices[0].message.content or ""

        for question, answer in zip(QUESTIONS, await asyncio.gather(*map(ask, QUESTIONS)), strict=True):
            print(f"{question} {answer!r}")
        try:
            await client.completions.create(model=model, prompt="a", temperature=9)
        except openai.BadRequestError as error:
            print(f"refused, as it should be: {error.body['message']}")


asyncio.run(main())
