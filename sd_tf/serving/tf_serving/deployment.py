"""How to start the server on the folder: its flags, compose.yaml and kubernetes.yaml."""

import math
from dataclasses import dataclass
from pathlib import Path
from string import Template

from sd_tf.serving.tf_serving import templates
from sd_tf.serving.tf_serving.configs import METRICS_PATH
from sd_tf.serving.tf_serving.folder import (
    BATCHING_CONFIG,
    MODELS,
    MODELS_CONFIG,
    MONITORING_CONFIG,
    MOUNTED,
    MOUNTED_MODELS,
    Settings,
)

GRPC_PORT, REST_PORT = 8500, 8501  # of the image's entry point
XLA_CACHE = "/var/cache/xla"
REST_TIMEOUT_SECONDS = 3600
START_MINUTES = 30  # for loading, compiling and warming up
CONFIG_POLL_SECONDS = 60


@dataclass(frozen=True)
class Deployment:
    settings: Settings
    batching: bool  # some version may be batched
    probed: str  # the model whose status tells compose that the server is up
    weights: int  # bytes of the served versions

    @property
    def flags(self) -> list[str]:
        """Of tensorflow_model_server. Ports are the entry point's."""
        flags = [
            f"--model_config_file={MOUNTED}/{MODELS_CONFIG}",
            f"--model_config_file_poll_wait_seconds={CONFIG_POLL_SECONDS}",
            "--allow_version_labels_for_unavailable_models=true",
            f"--monitoring_config_file={MOUNTED}/{MONITORING_CONFIG}",
            "--enable_grpc_healthcheck_service=true",
            f"--rest_api_timeout_in_ms={REST_TIMEOUT_SECONDS * 1000}",
        ]
        if self.settings.xla:
            flags.append(f"--xla_{self.settings.device}_compilation_enabled=true")
        if self.batching:
            flags += [
                "--enable_batching=true",
                "--enable_per_model_batching_parameters=true",
                f"--batching_parameters_file={MOUNTED}/{BATCHING_CONFIG}",
            ]
        return flags

    @property
    def environment(self) -> dict[str, str]:
        result = {}
        if self.settings.xla:
            # What is compiled is good for this release alone, and the keys do not tell.
            folder = f"{XLA_CACHE}/{self.settings.image.rpartition(':')[2]}"
            result["TF_XLA_FLAGS"] = f"--tf_xla_persistent_cache_directory={folder}"
        if self.settings.device == "gpu":
            result["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        return result

    @property
    def name(self) -> str:
        """Kubernetes' names have no underscore."""
        return self.settings.model_name("sd_tf").replace("_", "-")

    def compose(self) -> str:
        return Template(templates.COMPOSE).substitute(
            image=self.settings.image,
            flags=_items(self.flags, 6),
            environment=_section("environment", _pairs(self.environment, 6), 4),
            cache=f"      - xla_cache:{XLA_CACHE}\n" if self.settings.xla else "",
            volumes="volumes:\n  xla_cache:\n" if self.settings.xla else "",
            device=templates.COMPOSE_GPU if self.settings.device == "gpu" else "",
            probed=self.probed,
            minutes=START_MINUTES,
            **_PLACES,
        )

    def kubernetes(self) -> str:
        gibibytes = math.ceil(self.weights / 2**30)
        environment = "".join(
            f'            - {{ name: {key}, value: "{value}" }}\n'
            for key, value in self.environment.items()
        )
        gpu = self.settings.device == "gpu"
        return Template(templates.KUBERNETES).substitute(
            name=self.name,
            image=self.settings.image,
            flags=_items(self.flags, 12),
            environment=_section("env", environment, 10),
            gpu="              nvidia.com/gpu: 1\n" if gpu else "",
            cpus=2 if gpu else 4,
            memory=2 * gibibytes + 4,
            storage=4 * gibibytes + 4,
            cache=templates.KUBERNETES_CACHE_MOUNT if self.settings.xla else "",
            cache_volume=templates.KUBERNETES_CACHE_VOLUME if self.settings.xla else "",
            failures=START_MINUTES * 6,
            metrics=METRICS_PATH,
            **_PLACES,
        )


_PLACES = {
    "mounted": MOUNTED,
    "mounted_models": MOUNTED_MODELS,
    "models": MODELS,
    "xla_cache": XLA_CACHE,
    "grpc": GRPC_PORT,
    "rest": REST_PORT,
}


def weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("variables.data-*"))


def _items(values: list[str], indent: int) -> str:
    return "".join(f"{' ' * indent}- {value}\n" for value in values)


def _pairs(values: dict[str, str], indent: int) -> str:
    return "".join(f'{" " * indent}{key}: "{value}"\n' for key, value in values.items())


def _section(key: str, content: str, indent: int) -> str:
    return f"{' ' * indent}{key}:\n{content}" if content else ""
