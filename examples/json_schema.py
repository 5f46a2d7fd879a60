"""An answer that fits a pydantic model. The prompt says what is wanted, too: a schema forces the form, not the sense."""

import os
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    sentiment: Literal["good", "bad", "mixed"]
    stars: Annotated[int, Field(ge=1, le=5)]
    would_return: bool


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
made = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[
        {"role": "system", "content": "Rate the review as JSON with sentiment, stars and would_return."},
        {"role": "user", "content": "The soup was cold, but the cake was the best of my life!"},
    ],
    response_format=Review,
    max_tokens=256,
    temperature=0,
)
print(repr(made.choices[0].message.parsed))
