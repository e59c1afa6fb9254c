"""The application's deployments, and how they are connected."""

import dataclasses
import uuid

from ray import serve
from ray.serve.config import AutoscalingConfig

from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.needed_pictures import blank_pictures
from sd_tf.serving.ray_app.front import Front
from sd_tf.serving.ray_app.models import ModelReplica
from sd_tf.serving.ray_app.settings import Scale, Settings

NAME = "sd_tf"
FRONT = "front"
MODEL_CALLS = 8  # that a replica accepts at once: one runs, the others wait or check its health
FRONT_CALLS = 8  # that Ray makes: its callers come over HTTP and gRPC
LOGGING = {"encoding": "JSON", "enable_access_log": True}


def build(settings: Settings):
    """Build the application for `serve.run`."""
    manifest = Manifest.read(settings.export_dir)
    for shape in settings.warm_up or ():
        manifest.shapes.checked(shape)
    check_defaults(settings, manifest)
    settings = with_scales(settings, list(manifest.parts))
    application = uuid.uuid4().hex
    models = {
        name: serve.deployment(ModelReplica, name=name)
        .options(**_options(settings.scales[name], MODEL_CALLS))
        .bind(
            settings.export_dir,
            name,
            settings.jit_compile,
            settings.compile_cache,
            settings.warm_up,
            settings.warm_up_all,
            settings.keep_old,
            application,
        )
        for name in manifest.parts
    }
    front = serve.deployment(Front, name=FRONT).options(
        **_options(settings.scales[FRONT], FRONT_CALLS)
    )
    return front.bind(settings, models)


def check_defaults(settings: Settings, manifest: Manifest) -> None:
    """Refuse a server's defaults for calls that the export cannot draw with."""
    given = {"num_steps": settings.num_steps, "guidance_scale": settings.guidance_scale}
    if any(value is not None for value in given.values()):
        pictures = blank_pictures(manifest, manifest.shapes.first.size)
        Call("", **given, **pictures).completed(manifest)


def with_scales(settings: Settings, components: list[str]) -> Settings:
    """Complete the scales by every deployment's default."""
    known = [FRONT, *components]
    if unknown := sorted(settings.scales.keys() - set(known)):
        raise ValueError(
            f"There is no deployment {', '.join(unknown)}. There are {', '.join(known)}."
        )
    front = settings.scales.get(FRONT, Scale())
    if front.least != front.most:
        raise ValueError(
            f"{FRONT} has a fixed number of replicas: Ray does not see what its callers send. "
            f"Received: {front.least}-{front.most}"
        )
    scales = {name: Scale.of(name) for name in known}
    return dataclasses.replace(settings, scales={**scales, **settings.scales})


def _options(scale: Scale, calls: int) -> dict:
    options = {
        "max_ongoing_requests": calls,
        "ray_actor_options": {"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        "logging_config": LOGGING,
        "graceful_shutdown_timeout_s": 20,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
    }
    if scale.least == scale.most:
        return {**options, "num_replicas": scale.least}
    autoscaling = AutoscalingConfig(
        min_replicas=scale.least, max_replicas=scale.most, target_ongoing_requests=1
    )
    return {**options, "autoscaling_config": autoscaling}
