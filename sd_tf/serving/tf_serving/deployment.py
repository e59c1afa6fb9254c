"""How the server is started on a serving folder: flags, compose.yaml and kubernetes.yaml."""

import math
from dataclasses import dataclass
from pathlib import Path

import yaml

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

GRPC_PORT, REST_PORT = 8500, 8501  # set by the image's entry point
# A folder of the image that every user may write to: a volume mounted there takes over its mode.
XLA_CACHE = "/var/tmp"  # noqa: S108
USER = 65532  # has no rights in the image, and no name
REST_TIMEOUT_SECONDS = 3600
START_MINUTES = 30  # for loading, compiling and warming up
CONFIG_POLL_SECONDS = 60

# Whether the model is served, asked over TCP by bash alone.
HEALTH = (
    "exec 3<>/dev/tcp/127.0.0.1/{rest} && "
    "printf 'GET /v1/models/{probed} HTTP/1.0\\r\\n\\r\\n' >&3 && "
    "grep -q AVAILABLE <&3"
)
ABOUT_COMPOSE = """\
docker compose up -d    (from this folder; the first start compiles, see README.md)

The ports open once every model is loaded and warmed up: gRPC on the first, REST and metrics on the
second. They are published on one address of this machine, HOST:PORT:PORT below.

The server runs without root, capabilities and a root folder that it can change, so this folder's
files have to be readable for everyone."""
ABOUT_KUBERNETES = """\
kubectl apply -f kubernetes.yaml

The models lie in a volume, not in the image: they are gigabytes, and a new version is a copy of
files and a new models.config, which the server reads again by itself, not a new image. Copy this
whole folder to the volume's root.

- accessModes: ReadWriteMany is for more than one node. Where no storage class of yours offers it:
  ReadWriteOnce, one node.
- rollingUpdate: the new pod comes first. Without room for it (a free GPU): maxSurge 0 and
  maxUnavailable 1.
- The ports open once every model is loaded and warmed up, so that health is readiness. (gRPC
  probes: Kubernetes 1.24 and later.)
- xla-cache, where there is one, survives a container's restart. A claim of your own in its place
  survives the pod; its nodes then have to be of one kind, as nothing checks what was compiled for
  another.
- gRPC keeps its connections: with several replicas, balance in the client or in a mesh."""


@dataclass(frozen=True)
class Deployment:
    """One server: the settings, and facts about the versions that it serves."""

    settings: Settings
    batching: bool  # whether any version may be batched
    probed: str  # the model whose status tells compose that the server is ready
    weights: int  # bytes of weights of the served versions

    @property
    def flags(self) -> list[str]:
        """The flags of tensorflow_model_server. The image's entry point adds the ports."""
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
            # Compiled code is valid for this release only, but the cache's keys do not name it.
            folder = f"{XLA_CACHE}/{self.settings.image.rpartition(':')[2]}"
            result["TF_XLA_FLAGS"] = f"--tf_xla_persistent_cache_directory={folder}"
        if self.settings.device == "gpu":
            result["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        return result

    @property
    def name(self) -> str:
        """The name of Kubernetes' objects, in which underscores are not allowed."""
        return self.settings.model_name("sd_tf").replace("_", "-")

    def compose(self) -> str:
        """Return the text of compose.yaml."""
        xla, gpu = self.settings.xla, self.settings.device == "gpu"
        models = f"./{MODELS}:{MOUNTED_MODELS}:ro"
        # As a folder: a file that is mounted alone would not follow its replacement.
        volumes = [models, f".:{MOUNTED}:ro", *([f"xla_cache:{XLA_CACHE}"] if xla else [])]
        device = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        service = {
            "image": self.settings.image,
            "command": self.flags,
            **_if(self.environment, environment=self.environment),
            "ports": [self._published(port) for port in (GRPC_PORT, REST_PORT)],
            "volumes": volumes,
            "user": f"{USER}:{USER}",
            "read_only": True,
            "tmpfs": ["/tmp"],  # noqa: S108
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "healthcheck": {
                # The image has bash, but no curl.
                "test": ["CMD", "bash", "-c", HEALTH.format(rest=REST_PORT, probed=self.probed)],
                "interval": "15s",
                "timeout": "10s",
                "retries": 4,
                "start_period": f"{START_MINUTES}m",
            },
            "restart": "unless-stopped",
            "deploy": {
                "resources": {
                    "reservations": {"memory": self._memory("G"), **_if(gpu, devices=[device])}
                }
            },
        }
        content = {"services": {"tf_serving": service}, **_if(xla, volumes={"xla_cache": None})}
        return _yaml(ABOUT_COMPOSE, content)

    def _published(self, port: int) -> str:
        host = self.settings.host
        return f"{f'[{host}]' if ':' in host else host}:{port}:{port}"

    def _memory(self, unit: str) -> str:
        """Return what the server may take: the weights twice while it loads, and a picture."""
        return f"{2 * math.ceil(self.weights / 2**30) + 4}{unit}"

    def kubernetes(self) -> str:
        """Return the text of kubernetes.yaml."""
        return _yaml(ABOUT_KUBERNETES, self._claim(), self._deployment(), self._service())

    def _claim(self) -> dict:
        gibibytes = math.ceil(self.weights / 2**30)
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": f"{self.name}-folder"},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": f"{4 * gibibytes + 4}Gi"}},
            },
        }

    def _deployment(self) -> dict:
        annotations = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(REST_PORT),
            "prometheus.io/path": METRICS_PATH,
        }
        volumes = [
            {"name": "folder", "persistentVolumeClaim": {"claimName": f"{self.name}-folder"}},
            {"name": "tmp", "emptyDir": {}},
            *([{"name": "xla-cache", "emptyDir": {}}] if self.settings.xla else []),
        ]
        pod = {
            "terminationGracePeriodSeconds": 120,  # for requests under way
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container()],
            "volumes": volumes,
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": self.name, "labels": {"app": self.name}},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": {"app": self.name}},
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
                },
                "template": {
                    "metadata": {"labels": {"app": self.name}, "annotations": annotations},
                    "spec": pod,
                },
            },
        }

    def _container(self) -> dict:
        xla, gpu = self.settings.xla, self.settings.device == "gpu"
        memory = self._memory("Gi")
        environment = [{"name": key, "value": value} for key, value in self.environment.items()]

        def probe(**timing) -> dict:  # gRPC probes: Kubernetes 1.24 and later
            return {"grpc": {"port": GRPC_PORT}, **timing}

        return {
            "name": "tf-serving",
            "image": self.settings.image,
            "args": self.flags,
            **_if(environment, env=environment),
            "ports": [
                {"name": "grpc", "containerPort": GRPC_PORT},
                {"name": "rest", "containerPort": REST_PORT},
            ],
            "startupProbe": probe(periodSeconds=10, failureThreshold=START_MINUTES * 6),
            "readinessProbe": probe(periodSeconds=5, timeoutSeconds=5),
            "livenessProbe": probe(periodSeconds=20, timeoutSeconds=10, failureThreshold=6),
            "resources": {
                "requests": {"cpu": "2" if gpu else "4", "memory": memory},
                "limits": {**({"nvidia.com/gpu": 1} if gpu else {}), "memory": memory},
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [
                {"name": "folder", "mountPath": MOUNTED, "readOnly": True},
                {
                    "name": "folder",
                    "mountPath": MOUNTED_MODELS,
                    "subPath": MODELS,
                    "readOnly": True,
                },
                {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
                *([{"name": "xla-cache", "mountPath": XLA_CACHE}] if xla else []),
            ],
        }

    def _service(self) -> dict:
        ports = (("grpc", GRPC_PORT), ("rest", REST_PORT))
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "labels": {"app": self.name}},
            "spec": {
                "selector": {"app": self.name},
                "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports],
            },
        }


def weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("variables.data-*"))


def _if(condition, **fields) -> dict:
    return fields if condition else {}


def _yaml(about: str, *documents: dict) -> str:
    comment = "".join(f"# {line}".rstrip() + "\n" for line in about.splitlines())
    return comment + yaml.safe_dump_all(documents, sort_keys=False, width=math.inf)
