"""Settings of the predictor: environment variables ECOSPEC_PREDICTOR_SERVICE_<NAME>, or the options of the command line.

A wrong or unknown setting stops the start with its name, its value and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ecospec_proto.shared_state import ALLOWED, StoreAddress

from .errors import SettingsError

PREFIX = "ECOSPEC_PREDICTOR_SERVICE_"
SECRETS = ("state_store_url", "state_store_password")  # never shown; the address may hold a password


def _paths(value: object) -> object:
    """Paths, or text with commas between them; an option that was given several times is a list of either."""
    if isinstance(value, list | tuple):
        return tuple(path for part in value for path in cast(tuple[object, ...], _paths(part)))
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else (value,)


def _check_store(value: SecretStr) -> SecretStr:
    if value.get_secret_value():
        StoreAddress.parse(value.get_secret_value())
    return value


class Settings(BaseSettings):
    """description: what is allowed, as it appears in error messages and in --help."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    model_dir: Annotated[
        tuple[Path, ...],
        BeforeValidator(_paths),
        Field(
            min_length=1,
            description="a directory written by the predictor's training, or one of versions that names the current one; several, "
            "one for each target, separated by commas",
        ),
    ]
    embeddings: Annotated[
        tuple[Path, ...],
        BeforeValidator(_paths),
        Field(
            description="the target's token embeddings, which a small predictor needs: a GGUF file, a safetensors file or the "
            "target's directory; one for each model_dir, or none",
        ),
    ] = ()
    watch_versions: Annotated[
        bool, Field(description="true or false: whether a new current version is served as soon as it is there")
    ] = False
    host: Annotated[str, Field(min_length=1, description="a host name or address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="a port, 1 to 65535, or 0 for any free one")] = 50051
    metrics_host: Annotated[str, Field(min_length=1, description="a host name or address for the metrics")] = (
        "127.0.0.1"
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535, description="a port, 1 to 65535, or 0 for any free one")] = 9101
    tls_certificate: Annotated[Path | None, Field(description="a PEM file with the server's certificate chain")] = None
    tls_key: Annotated[Path | None, Field(description="a PEM file with the certificate's key")] = None
    tls_client_ca: Annotated[
        Path | None,
        Field(description="a PEM file with the authorities of callers, who then must present a certificate"),
    ] = None
    allow_plaintext: Annotated[
        bool, Field(description="true or false: whether other machines may be answered without TLS")
    ] = False
    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
            description="auto (for a Hugging Face backbone the first CUDA device, else the CPU), cpu, cuda or cuda:N",
        ),
    ] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024, description="CPU threads of the model, 1 to 1024")] = 1
    batch_window_microseconds: Annotated[
        int, Field(ge=0, le=1_000_000, description="time a batch waits for more callers, 0 to 1000000 microseconds")
    ] = 0
    max_trees: Annotated[int, Field(ge=1, le=4096, description="trees in one request and in one batch, 1 to 4096")] = 64
    max_nodes_per_tree: Annotated[int, Field(ge=1, le=65536, description="nodes in one tree, 1 to 65536")] = 256
    max_context_bytes: Annotated[
        int, Field(ge=4, le=2**30, description="bytes of one tree's context_tokens, 4 to 1073741824")
    ] = 2**20
    max_queue: Annotated[int, Field(ge=1, le=1_000_000, description="requests that may wait, 1 to 1000000")] = 256
    session_bytes: Annotated[
        int,
        Field(ge=2**20, le=2**40, description="memory for the contexts of sessions, 1048576 to 1099511627776 bytes"),
    ] = 256 * 2**20
    session_idle_seconds: Annotated[
        float,
        Field(gt=0, le=86400, allow_inf_nan=False, description="time after which an unused session ends, up to 86400"),
    ] = 600.0
    max_message_bytes: Annotated[
        int, Field(ge=1024, le=2**30, description="largest request message, 1024 to 1073741824 bytes")
    ] = 16 * 2**20
    grace_seconds: Annotated[
        float, Field(ge=0, le=3600, allow_inf_nan=False, description="time for running requests at shutdown, 0 to 3600")
    ] = 5.0
    state_store_url: Annotated[
        SecretStr,
        AfterValidator(_check_store),
        Field(description=f"empty without live routes and registry, or {ALLOWED}"),
    ] = SecretStr("")
    state_store_password: Annotated[
        SecretStr, Field(description="the state store's password, instead of the one in its address")
    ] = SecretStr("")
    score_tokens_per_second: Annotated[
        float,
        Field(
            ge=0,
            le=1e6,
            allow_inf_nan=False,
            description="live tokens of the state store that the model is scored on, 0 (none) to 1000000 per second",
        ),
    ] = 20.0
    drift_margin: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            allow_inf_nan=False,
            description="how far live accuracy may lie below the held-out one before it is an alarm, above 0, at most 1",
        ),
    ] = 0.05
    follow_registry: Annotated[
        bool, Field(description="true or false: whether a version that is published in the state store is served")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="debug, info, warning or error")
    ] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # load_settings() reads the environment, so that unknown names are seen


def load_settings(overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Options win over the environment, which wins over the defaults. Raises SettingsError: one sentence."""
    values: dict[str, Any] = {}
    for variable, value in (os.environ if environment is None else environment).items():
        if variable.upper().startswith(PREFIX):
            name = variable[len(PREFIX) :].lower()
            if name not in Settings.model_fields:
                raise SettingsError(f"Setting {variable} is set, but no setting has this name; {_allowed_names()}.")
            values[name] = value
    values.update(overrides or {})
    try:
        return Settings(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        if name not in Settings.model_fields:
            text = f"Setting {name} is {problem['input']!r}, but no setting has this name; {_allowed_names()}."
            raise SettingsError(text) from None
        shown = "missing" if problem["type"] == "missing" else repr(problem["input"])
        shown = "a secret" if name in SECRETS else shown
        allowed = Settings.model_fields[name].description
        names = f"--{name.replace('_', '-')}, {PREFIX}{name.upper()}"
        raise SettingsError(f"Setting {name} ({names}) is {shown}; allowed: {allowed}.") from None


def _allowed_names() -> str:
    return f"allowed: {', '.join(Settings.model_fields)}"
