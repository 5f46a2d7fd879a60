"""A chat answer as it arrives, then what it cost. Fields that the client does not know go into extra_body."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is gravity?"},
    ],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"repetition_penalty": 1.1},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    else:  # the last one
        speculation = chunk.metrics["speculative_decoding"]
        print(f"\n{chunk.usage.completion_tokens} tokens in {chunk.metrics['ecospec']['steps']} steps, of which")
        print(f"{speculation['num_accepted_draft_tokens']} of {speculation['num_draft_tokens']} drafts were accepted")
