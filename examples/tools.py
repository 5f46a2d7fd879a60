"""The model calls a function, and gets its result. Arguments fit the function's schema by construction."""

import json
import os

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city today.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def weather(city: str, unit: str) -> str:
    return f"In {city} it is {'20 degrees Celsius' if unit == 'celsius' else '68 degrees Fahrenheit'} and sunny."


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Rome today, in celsius?"}]
made = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=256
)
(call,) = made.choices[0].message.tool_calls
arguments = json.loads(call.function.arguments)
result = weather(**arguments)
print(f"{call.function.name}({arguments}) -> {result}")

messages += [made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
answer = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=32, temperature=0
)
print(answer.choices[0].message.content)
