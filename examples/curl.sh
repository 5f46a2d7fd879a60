#!/bin/sh
# The API with curl alone: a stream, an answer in JSON, what is served, tokens and back.
set -eu
URL=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
KEY=${OPENAI_API_KEY:-none}

ask() { # path, JSON
    curl --silent --show-error --fail-with-body --no-buffer "$1" \
        -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' -d "$2"
    echo
}

curl --silent --show-error --fail-with-body -H "Authorization: Bearer $KEY" "$URL/models"
echo
ask "$URL/completions" '{"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "stream": true}'
ask "$URL/chat/completions" '{
    "messages": [{"role": "system", "content": "Answer as JSON."}, {"role": "user", "content": "Is rain wet?"}],
    "max_tokens": 64, "seed": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {
        "type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"], "additionalProperties": false}}}
}'
ask "${URL%/v1}/tokenize" '{"prompt": "Once upon a time"}'
ask "${URL%/v1}/detokenize" '{"tokens": [1, 2, 3]}'
