"""Continue several prompts in one request, and look at what was likely."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

prompts = ["The capital of France is", "Water boils at"]
made = client.completions.create(model=model, prompt=prompts, max_tokens=12, seed=1, logprobs=2)
for choice in made.choices:
    print(f"{prompts[choice.index]!r} -> {choice.text!r} ({choice.finish_reason})")

scores = made.choices[0].logprobs
for token, logprob in zip(scores.tokens, scores.token_logprobs, strict=True):
    print(f"{logprob:8.3f}  {token!r}")

# The same seed gives the same text, whatever else the server does meanwhile.
again = client.completions.create(model=model, prompt=prompts[0], max_tokens=12, seed=1)
assert again.choices[0].text == made.choices[0].text
print(f"{made.usage.prompt_tokens} tokens read, {made.usage.completion_tokens} written")
