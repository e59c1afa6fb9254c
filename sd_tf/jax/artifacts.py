"""The files of a pipeline compiled ahead of time, and loading them without tracing or Keras.

OUT/pipeline.json, tokenizer/     as in an export
OUT/compiled.json                 what it was compiled for and of, and every program's arguments
OUT/COMPONENT/weights.safetensors
OUT/COMPONENT/ENDPOINT.xla        machine code: load only what you trust
OUT/COMPONENT/ENDPOINT.stablehlo  the program before compilation, for any platform and mesh
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from sd_tf.config import END_TOKEN, PipelineConfig
from sd_tf.jax.runner import Program
from sd_tf.jax.sharding import DATA, MODEL, of_value, of_weight, place
from sd_tf.runtime.compile_cache import processor
from sd_tf.runtime.manifest import ExportError, read_record, write_record

FILE_NAME = "compiled.json"
FORMAT_VERSION = 2  # 2: the configuration
WEIGHTS = "weights.safetensors"
# Platforms, as `jax.export` names them.
STABLEHLO_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# Fields of a configuration that programs do not depend on, or only by what is compared besides: the
# autoencoder's dtype, and the tokens of "".
NOT_COMPILED = ("sample_size", "force_upcast", "pad_token_id")

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[tuple[int, ...], str]]  # argument → shape, dtype


@dataclass(frozen=True)
class Signature:
    """A program's arguments, divided as by `JaxComponent.arguments`, and its outputs."""

    weights: Shapes
    state: Shapes
    inputs: Shapes
    outputs: tuple[str, ...]
    report: dict  # seconds to compile, memory, arithmetic: see `jax.compile`

    def structs(self):
        return tuple(
            {name: jax.ShapeDtypeStruct(tuple(s), d) for name, (s, d) in part.items()}
            for part in (self.weights, self.state, self.inputs)
        )


@dataclass(frozen=True)
class Target:
    """The hardware, mesh and versions that machine code was compiled for."""

    platform: str  # cpu | gpu | tpu
    device_kind: str
    processor: str  # CPU only: a digest of the features that code depends on
    data: int
    model: int
    versions: dict[str, str]

    @classmethod
    def of(cls, mesh: Mesh) -> "Target":
        device = mesh.devices.flat[0]
        return cls(
            device.platform,
            device.device_kind,
            processor_digest() if device.platform == "cpu" else "",
            mesh.shape[DATA],
            mesh.shape[MODEL],
            {
                "jax": jax.__version__,
                "jaxlib": jax.lib.__version__,
                **plugin_versions(device.platform),
            },
        )

    def differences(self, here: "Target") -> list[str]:
        pairs = zip(
            dataclasses.asdict(self).items(), dataclasses.asdict(here).values(), strict=True
        )
        return [
            f"{name} {theirs!r} (here {ours!r})" for (name, theirs), ours in pairs if theirs != ours
        ]


@dataclass(frozen=True)
class Compiled:
    target: Target
    topology: str | None  # the TPU slice, where it was compiled for but not present
    has_weights: bool
    config: dict[str, Any]  # what the programs compute: see `compiled_config`
    programs: dict[str, dict[str, Signature]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        write_record(self, folder / FILE_NAME, FORMAT_VERSION)

    @classmethod
    def read(cls, folder: Path) -> "Compiled":
        path = folder / FILE_NAME
        if not path.is_file():
            raise ExportError(
                f"{folder} was not compiled ahead of time: it has no {FILE_NAME}. Make it with "
                f"`sd-tf jax compile`."
            )
        content = read_record(path, FORMAT_VERSION, "compile again")
        try:
            programs = {
                component: {name: Signature(**part) for name, part in endpoints.items()}
                for component, endpoints in content.pop("programs").items()
            }
            return cls(Target(**content.pop("target")), programs=programs, **content)
        except (AttributeError, KeyError, TypeError) as error:
            raise ExportError(f"{path} cannot be read: {error!r}. Compile again.") from error


def load_programs(
    folder: Path, compiled: Compiled, mesh: Mesh, fallback: bool
) -> dict[str, dict[str, Program]]:
    """Load machine code where it fits this machine; else, with `fallback`, compile StableHLO."""

    def read_all(read):
        return {
            component: {
                endpoint: read(folder / component / endpoint, signature, mesh)
                for endpoint, signature in endpoints.items()
            }
            for component, endpoints in compiled.programs.items()
        }

    if reasons := compiled.target.differences(Target.of(mesh)):
        message = f"{folder} was compiled for {', '.join(reasons)}."
    else:
        try:
            return read_all(_machine_code)
        except MachineCodeError as error:
            message = str(error)
    if not fallback:
        raise ExportError(f"{message} Compile it here, or load with fallback=True.")
    logger.warning("%s Its StableHLO is compiled instead.", message)
    return read_all(_stablehlo)


class MachineCodeError(ExportError):
    """Machine code that the runtime here does not take, though its file is undamaged."""


def _machine_code(path: Path, signature: Signature, mesh: Mesh) -> Program:
    weights, state, inputs = signature.structs()
    arguments = jax.tree.structure(((weights, state, inputs), {}))
    outputs = jax.tree.structure(dict.fromkeys(signature.outputs, 0))
    file = path.with_suffix(".xla")
    try:
        run = serialize_executable.deserialize_and_load(
            file.read_bytes(), arguments, outputs, execution_devices=list(mesh.devices.flat)
        )
    except Exception as error:  # the runtime's reader raises many types
        raise MachineCodeError(f"{file} does not run here: {error}.") from error
    return _program(run, signature, mesh)


def _stablehlo(path: Path, signature: Signature, mesh: Mesh) -> Program:
    file = path.with_suffix(".stablehlo")
    exported = jax.export.deserialize(bytearray(file.read_bytes()))
    parts = (of_weights(mesh, signature.weights), *_of_values(mesh, signature))
    run = jax.jit(exported.call, in_shardings=parts, donate_argnums=1)
    return _program(run, signature, mesh)


def _program(run, signature: Signature, mesh: Mesh) -> Program:
    return Program(run, *_of_values(mesh, signature))


def _of_values(mesh, signature):
    return tuple(
        {name: of_value(mesh, name, len(shape)) for name, (shape, _) in part.items()}
        for part in (signature.state, signature.inputs)
    )


def of_weights(mesh, weights: Shapes):
    return {name: of_weight(mesh, name, shape) for name, (shape, _) in weights.items()}


def load_weights(folder: Path, compiled: Compiled, mesh: Mesh) -> dict[str, dict[str, jax.Array]]:
    """Load each component's weights onto the mesh, one tensor at a time."""
    return {
        component: _weights_of(folder / component / WEIGHTS, endpoints, mesh)
        for component, endpoints in compiled.programs.items()
    }


def _weights_of(path: Path, endpoints: dict[str, Signature], mesh: Mesh) -> dict[str, jax.Array]:
    expected = next(iter(endpoints.values())).weights
    shardings = of_weights(mesh, expected)
    try:
        with safe_open(path, framework="numpy") as file:
            if set(file.keys()) != expected.keys():
                raise ExportError(f"{path} holds other weights than were compiled. Compile again.")
            return {name: place(file.get_tensor(name), shardings[name]) for name in expected}
    except (SafetensorError, FileNotFoundError) as error:
        raise ExportError(f"{path} cannot be read: {error}. Compile again.") from error


def compiled_config(config: PipelineConfig) -> dict[str, Any]:
    """Return the numbers and choices of a configuration that are compiled into programs, by name.

    The schedule is not among them: its tables are weights.
    """
    found = {
        f"{part}.{name}": value
        for part, model in config.components.items()
        for name, value in dataclasses.asdict(model).items()
        if name not in NOT_COMPILED
    }
    for name, value in found.items():
        if name.endswith(".eos_token_id") and value is None:  # the highest id, which is this one
            found[name] = END_TOKEN
    found |= {
        "latent_inputs": config.latent_inputs,
        "zero_empty_negative": config.zero_empty_negative,
        "zero_tokens": config.zero_tokens,
    }
    return json.loads(json.dumps(found))  # as `Compiled.read` gives it: tuples are lists


def check_config(compiled: Compiled, config: PipelineConfig, source: str) -> None:
    """Refuse a checkpoint that computes something else than what was compiled."""
    given = compiled_config(config)
    for name in sorted(compiled.config.keys() | given.keys()):
        theirs, ours = (known.get(name, "absent") for known in (compiled.config, given))
        if theirs != ours:
            raise misfit(source, name, theirs, ours)


def misfit(source: str, what: str, wanted, received) -> ExportError:
    return ExportError(
        f"{source} does not fit the compiled pipeline: {what} must be {wanted}. Received: "
        f"{received}. Compile again for this checkpoint."
    )


def check_weights(endpoints: dict[str, Signature], weights, source: str) -> None:
    """Refuse weights whose shapes or dtypes a component was not compiled for."""
    expected, given = next(iter(endpoints.values())).weights, shapes_of(weights)
    for name in sorted(expected.keys() | given.keys()):
        theirs, ours = (_described(shapes.get(name)) for shapes in (expected, given))
        if theirs != ours:
            raise misfit(source, name, theirs, ours)


def _described(shape_and_dtype) -> str:
    if shape_and_dtype is None:
        return "absent"
    shape, dtype = shape_and_dtype
    return f"{dtype} {tuple(shape)}"


def plugin_versions(platform: str) -> dict[str, str]:
    """Return the versions of what compiles for a platform beside jaxlib: libtpu, or JAX's plugins.

    The plugins for GPUs (jax-cuda12-pjrt, jax-rocm7-pjrt, …) announce themselves to JAX by an entry
    point.
    """
    if platform == "tpu":
        found = importlib.metadata.distributions(name="libtpu")
    elif platform == "gpu":
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        found = (plugin.dist for plugin in plugins)
    else:
        found = ()
    return {distribution.name: distribution.version for distribution in found}


def processor_digest() -> str:
    return hashlib.sha256(json.dumps(processor()).encode()).hexdigest()[:16]


def shapes_of(structs) -> Shapes:
    return {name: (tuple(x.shape), np.dtype(x.dtype).name) for name, x in structs.items()}
