"""Settings of the orchestrator: environment variables ECOSPEC_<NAME>, or the options of the command line.

A wrong or unknown setting stops the start with its name, its value and what is allowed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ecospec_proto.shared_state import ALLOWED, StoreAddress

from .core import SettingsError

PREFIX = "ECOSPEC_"
SECRETS = (
    "api_keys",
    "admin_key",
    "state_store_url",
    "state_store_password",
)  # never shown; the address may hold a password
ADMIN_KEY_CHARACTERS = 24
# Variables of the predictor's own settings: both services may share one environment.
FOREIGN_PREFIXES = ("ECOSPEC_PREDICTOR_SERVICE_",)


def _check_address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("host:port is needed")
    return value


def _check_store(value: SecretStr) -> SecretStr:
    if value.get_secret_value():
        StoreAddress.parse(value.get_secret_value())
    return value


class Settings(BaseSettings):
    """description: what is allowed, as it appears in error messages and in --help."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    host: Annotated[str, Field(min_length=1, description="a host name or address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="a port, 1 to 65535, or 0 for any free one")] = 8000
    model: Annotated[
        str, Field(min_length=1, description="demo, or the directory of a Hugging Face mixture-of-experts model")
    ] = "demo"
    model_name: Annotated[
        str,
        Field(max_length=200, description="the name that clients and predictor use; by default that of the directory"),
    ] = ""
    engine: Annotated[
        Literal["torch", "tensorrt-llm"],
        Field(description="torch (embedded) or tensorrt-llm (inside NVIDIA's image, on GPUs)"),
    ] = "torch"
    tensor_parallel_size: Annotated[
        int, Field(ge=1, le=64, description="GPUs that share every layer with engine tensorrt-llm, 1 to 64")
    ] = 8
    expert_parallel_size: Annotated[
        int,
        Field(
            ge=0,
            le=64,
            description="GPUs that share out the experts with engine tensorrt-llm, 1 to 64, or 0 for all of them",
        ),
    ] = 0
    distributed_executor: Annotated[
        Literal["mpi", "ray"],
        Field(
            description="mpi (the GPUs of this machine) or ray (those of a Ray cluster that this machine is a node of): what runs the "
            "processes of engine tensorrt-llm"
        ),
    ] = "mpi"
    cuda_graphs: Annotated[
        bool,
        Field(
            description="true or false: whether steps of engine tensorrt-llm run as CUDA graphs; without them they are slow, and the "
            "predictor is asked in every step"
        ),
    ] = True
    token_table: Annotated[
        Path | None,
        Field(
            description="a trained predictor's token_table.safetensors, by which engine tensorrt-llm chooses inside CUDA graphs"
        ),
    ] = None
    draft_len_schedule: Annotated[
        Path | None,
        Field(
            description="a JSON file, batch size up to which -> draft length, for chains of engine tensorrt-llm under goodput"
        ),
    ] = None
    drafter: Annotated[
        str,
        Field(
            min_length=1,
            description="auto (the demo's own head, else ngram), ngram, mtp, none, or the directory of an EAGLE-3 head",
        ),
    ] = "auto"
    demo_dir: Annotated[
        Path, Field(description="the directory with the demo's routers, EAGLE-3 head and predictor")
    ] = Path("models/demo")
    gguf: Annotated[Path | None, Field(description="a GGUF file instead of the installed package's")] = None
    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
            description="auto (the first CUDA device; without one, and for the demo, the CPU), cpu, cuda or cuda:N",
        ),
    ] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024, description="CPU threads, 1 to 1024, or 0 for one per core")] = 0
    memory_bandwidth_gb_per_second: Annotated[
        float,
        Field(
            ge=0,
            le=1e6,
            allow_inf_nan=False,
            description="peak bandwidth of the memory that holds the weights, all devices together, up to 1000000 GB/s, or 0 where "
            "it is not known: only shown beside what is read",
        ),
    ] = 0.0
    predictor_address: Annotated[
        str, AfterValidator(_check_address), Field(description="host:port of the expert predictor")
    ] = "127.0.0.1:50051"
    predictor_deadline_ms: Annotated[
        float, Field(gt=0, le=60_000, allow_inf_nan=False, description="milliseconds above 0, at most 60000")
    ] = 50.0
    predictor_tls_ca: Annotated[
        Path | None, Field(description="a PEM file with the predictor's authorities; without it, plain text")
    ] = None
    predictor_tls_certificate: Annotated[
        Path | None, Field(description="a PEM file with the certificate shown to the predictor")
    ] = None
    predictor_tls_key: Annotated[Path | None, Field(description="a PEM file with that certificate's key")] = None
    policy: Annotated[
        Literal["none", "likelihood", "ecospec", "goodput"],
        Field(description="none, likelihood, ecospec or goodput (which and how many drafts, by measured cost)"),
    ] = "goodput"
    profile: Annotated[
        Path | None, Field(description="the file of ecospec-orchestrator profile; without it, this machine's own one")
    ] = None
    profile_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=600,
            allow_inf_nan=False,
            description="time to measure what a step costs at a start that finds no profile, up to 600, or 0 for never",
        ),
    ] = 20.0
    probe_share: Annotated[
        float,
        Field(
            ge=0,
            le=0.2,
            allow_inf_nan=False,
            description="share of the time for trying drafts that did not pay, 0 to 0.2",
        ),
    ] = 0.005
    max_slowdown: Annotated[
        float,
        Field(
            ge=1,
            le=100,
            allow_inf_nan=False,
            description="plain speed over a request's expected speed at most, 1 to 100",
        ),
    ] = 1.5
    expert_buffer: Annotated[
        Literal["batch", "request", "none"],
        Field(description="batch, request or none: who shares experts when drafts are priced"),
    ] = "batch"
    footprints: Annotated[
        Literal["predictor", "oracle", "none"],
        Field(description="predictor, oracle (a second forward, for ablations) or none"),
    ] = "predictor"
    footprint_accuracy: Annotated[
        float, Field(ge=0, le=1, allow_inf_nan=False, description="share of right experts that an oracle tells, 0 to 1")
    ] = 1.0
    expert_placement: Annotated[
        Path | None, Field(description="a JSON file, [layers][experts] -> expert-parallel rank; without it, one rank")
    ] = None
    gamma: Annotated[int, Field(ge=1, le=64, description="draft nodes verified per request and step, 1 to 64")] = 4
    eps: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, description="a number above 0, at most 1e6")] = 1.0
    seed_root: Annotated[bool, Field(description="true or false: whether the root's experts count as paid for")] = True
    draft_depth: Annotated[int, Field(ge=1, le=16, description="draft forwards per step, 1 to 16")] = 3
    draft_top_k: Annotated[int, Field(ge=1, le=16, description="draft nodes kept per level, 1 to 16")] = 2
    max_running: Annotated[int, Field(ge=1, le=1024, description="requests in one batch, 1 to 1024")] = 8
    max_waiting: Annotated[int, Field(ge=0, le=100_000, description="requests in the queue, 0 to 100000")] = 64
    max_context_tokens: Annotated[
        int, Field(ge=16, le=1_000_000, description="prompt and answer together, 16 to 1000000 tokens")
    ] = 2048
    kv_cache_mib: Annotated[
        int,
        Field(
            ge=0,
            le=2**24,
            description="memory for keys and values in MiB, or 0 for what max_running longest requests need, at most half of what is free",
        ),
    ] = 0
    prefix_reuse: Annotated[
        bool, Field(description="true or false: whether prompts that begin alike share what was computed of them")
    ] = True
    prefill_share: Annotated[
        float,
        Field(
            gt=0,
            le=100,
            allow_inf_nan=False,
            description="time for new prompts over time for running answers while both are there, above 0, at most 100",
        ),
    ] = 0.8
    max_body_bytes: Annotated[
        int, Field(ge=1024, le=2**30, description="largest request body, 1024 to 1073741824 bytes")
    ] = 2**20
    drain_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            le=86_400,
            description="time for running requests at shutdown, 0 to 86400; without it, as long as a request may take",
        ),
    ] = None
    api_keys: Annotated[SecretStr, Field(description="keys separated by commas; empty for an open server")] = SecretStr(
        ""
    )
    api_keys_file: Annotated[
        Path | None,
        Field(
            description="the file that ecospec-orchestrator key new NAME makes; with it, only its keys and api_keys let in"
        ),
    ] = None
    key_requests_per_minute: Annotated[
        int,
        Field(ge=0, le=10**9, description="requests per minute of a key without its own limit, or 0 for any number"),
    ] = 0
    key_tokens_per_minute: Annotated[
        int, Field(ge=0, le=10**12, description="tokens of prompts and answers per minute and key, or 0 for any number")
    ] = 0
    key_tokens_per_day: Annotated[
        int, Field(ge=0, le=10**12, description="tokens of prompts and answers per day and key, or 0 for any number")
    ] = 0
    key_max_concurrent: Annotated[
        int, Field(ge=0, le=10**6, description="requests at a time of a key on this server, or 0 for any number")
    ] = 0
    max_prompt_tokens: Annotated[
        int,
        Field(ge=0, le=1_000_000, description="longest prompt, 1 to 1000000 tokens, or 0 for what the context holds"),
    ] = 0
    max_request_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=86_400,
            allow_inf_nan=False,
            description="time of a request with its answer, up to 86400, or 0 for any",
        ),
    ] = 3600.0
    client_read_seconds: Annotated[
        float,
        Field(gt=0, le=3600, allow_inf_nan=False, description="time for a request to arrive, above 0, at most 3600"),
    ] = 30.0
    client_write_seconds: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            allow_inf_nan=False,
            description="time that a client may take nothing of a waiting answer, above 0, at most 3600",
        ),
    ] = 30.0
    max_connections: Annotated[
        int,
        Field(
            ge=1, le=100_000, description="open connections, 1 to 100000; what the process may open limits them, too"
        ),
    ] = 1024
    tls_certificate: Annotated[
        Path | None, Field(description="a PEM file with the certificate of the HTTP server; without it, plain text")
    ] = None
    tls_key: Annotated[Path | None, Field(description="a PEM file with that certificate's unencrypted key")] = None
    admin_port: Annotated[
        int | None,
        Field(ge=0, le=65535, description="a port for live settings and draining, 0 for any free one; without it, off"),
    ] = None
    admin_host: Annotated[
        str, Field(min_length=1, description="a host name or address to listen on for administrators")
    ] = "127.0.0.1"
    admin_key: Annotated[
        SecretStr, Field(description=f"the key of administrators, at least {ADMIN_KEY_CHARACTERS} characters")
    ] = SecretStr("")
    state_store_url: Annotated[
        SecretStr,
        AfterValidator(_check_store),
        Field(description=f"empty for a server on its own, or {ALLOWED}"),
    ] = SecretStr("")
    state_store_password: Annotated[
        SecretStr, Field(description="the state store's password, instead of the one in its address")
    ] = SecretStr("")
    trace_rate_tokens_per_second: Annotated[
        float,
        Field(
            ge=0,
            le=1e6,
            allow_inf_nan=False,
            description="tokens whose ids and experts go to the state store for the predictor, 0 (none leave) to 1000000 per second",
        ),
    ] = 0.0
    trace_max_records: Annotated[
        int, Field(ge=1, le=1_000_000, description="newest records that the trace stream keeps, 1 to 1000000")
    ] = 1024
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="debug, info, warning or error")
    ] = "info"

    @property
    def drain_limit_seconds(self) -> float:
        """At shutdown: no request that is allowed is cut off, unless drain_seconds says so."""
        return self.drain_seconds if self.drain_seconds is not None else self.max_request_seconds or 86_400.0

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key.strip() for key in self.api_keys.get_secret_value().split(",") if key.strip())

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
        if variable.upper().startswith(PREFIX) and not variable.upper().startswith(FOREIGN_PREFIXES):
            values[_known(variable)] = value
    values.update(overrides or {})
    try:
        return Settings(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        if name not in Settings.model_fields:
            raise SettingsError(f"Setting {name} is not known; allowed: {', '.join(Settings.model_fields)}.") from None
        shown = "a secret" if name in SECRETS else repr(problem["input"])
        allowed = Settings.model_fields[name].description
        raise SettingsError(f"Setting {name} ({PREFIX}{name.upper()}) is {shown}; allowed: {allowed}.") from None


def _known(variable: str) -> str:
    name = variable[len(PREFIX) :].lower()
    if name in Settings.model_fields:
        return name
    close = difflib.get_close_matches(name, list(Settings.model_fields), 1)
    hint = f"did you mean {PREFIX}{close[0].upper()}" if close else f"remove it; see --help for the {PREFIX}* variables"
    raise SettingsError(f"Setting {variable} is not known (its value is set in the environment); {hint}.")
