"""`python -m sd_tf.serving ray --export_dir …`: the Ray Serve application."""

import argparse
import os
import signal
import threading
from pathlib import Path

from sd_tf.compile_cache import for_workers
from sd_tf.manifest import Manifest
from sd_tf.serving.ray_app.settings import Scale, Settings

DEFAULTS = Settings(export_dir="")
DEFAULT_HTTP_PORT, DEFAULT_GRPC_PORT = 8000, 8500
EPILOG = """\
--replicas diffusion_model=1-4 scales between 1 and 4 with the load, decoder=2 keeps two; the
deployments are front, text_encoder, diffusion_model, decoder and image_encoder. On a cluster the
export folder and sd_tf have to be at the same place on every node.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--export_dir", required=True, help="what serialize_savedmodels.py wrote")
    parser.add_argument("--address", help="of a Ray cluster, or auto (default: a Ray of its own)")
    parser.add_argument("--detach", action="store_true", help="with --address: deploy and return")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all interfaces")
    parser.add_argument("--http_port", type=int, default=DEFAULT_HTTP_PORT)
    parser.add_argument("--grpc_port", type=int, default=DEFAULT_GRPC_PORT)
    parser.add_argument("--metrics_port", type=int, help="for Prometheus (default: Ray chooses)")
    for name, unit in (("replicas", "N or MIN-MAX"), ("cpus", "NUMBER"), ("gpus", "NUMBER")):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar=f"DEPLOYMENT={unit}", type=_pair
        )
    parser.add_argument("--nojit_compile", action="store_true", help="run without XLA")
    parser.add_argument("--compile_cache", help="folder where XLA keeps compiled code")
    parser.add_argument(
        "--warm_up_all",
        action="store_true",
        help="also compile what only TensorFlow Serving's clients call (seeded, from_noise, …)",
    )
    parser.add_argument("--num_steps", type=int, default=DEFAULTS.num_steps, help="when not asked")
    parser.add_argument("--guidance_scale", type=float, default=DEFAULTS.guidance_scale)
    parser.add_argument(
        "--max_queue", type=int, default=DEFAULTS.max_queue, help="waiting pictures"
    )
    parser.add_argument("--max_count", type=int, default=DEFAULTS.max_count, help="of one call")
    parser.add_argument("--batch_wait", type=float, default=DEFAULTS.batch_wait, help="seconds")
    parser.add_argument("--timeout", type=float, default=DEFAULTS.timeout, help="seconds of a call")
    parser.add_argument("--examples", help="text file: prompts that the page offers")
    parser.add_argument("--nowatch", action="store_true", help="keep the export that is there now")


def run(options: argparse.Namespace) -> int:
    settings = read_settings(options)
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions, gRPCOptions
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install 'sd_tf[serve]'.") from error
    from sd_tf.serving.ray_app.application import GRPC_SERVICES, NAME, build

    application = build(settings)
    if options.address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Of the minute that `serve.start` waits; after Ray's 5 s a busy machine's is given up.
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "50")
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            _metrics_export_port=options.metrics_port,
        )
    else:
        ray.init(address=options.address, log_to_driver=False)
    try:
        serve.start(
            proxy_location="EveryNode",
            http_options=HTTPOptions(host=options.host, port=options.http_port),
            grpc_options=gRPCOptions(port=options.grpc_port, grpc_servicer_functions=GRPC_SERVICES),
        )
        stop = threading.Event()
        for name in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own
            signal.signal(name, lambda *_: stop.set())
        print("loading and compiling …", flush=True)
        serve.run(application, name=NAME, route_prefix="/")
        print(
            f"the page: http://{options.host}:{options.http_port}   TensorFlow Serving's API: "
            f"grpc://{options.host}:{options.grpc_port}",
            flush=True,
        )
        if options.detach:
            return 0
        stop.wait()
        serve.delete(NAME)
    finally:
        ray.shutdown()
    return 0


def read_settings(options: argparse.Namespace) -> Settings:
    if options.detach and options.address is None:
        raise ValueError("--detach goes with --address: a Ray of its own ends with this command.")
    if options.address is not None and options.metrics_port is not None:
        raise ValueError("--metrics_port is the cluster's own (ray start --metrics-export-port).")
    for name in ("max_queue", "max_count", "num_steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is at least 1. Received: {getattr(options, name)}")
    for name in ("batch_wait", "timeout"):
        if not getattr(options, name) >= 0:
            raise ValueError(f"--{name} is at least 0. Received: {getattr(options, name)}")
    Manifest.read(options.export_dir)
    examples = ()
    if options.examples is not None:
        lines = Path(options.examples).read_text(encoding="utf-8").splitlines()
        examples = tuple(line.strip() for line in lines if line.strip())
    return Settings(
        export_dir=str(Path(options.export_dir).resolve()),
        jit_compile=not options.nojit_compile,
        compile_cache=for_workers(options.compile_cache, are_here=options.address is None),
        warm_up_all=options.warm_up_all,
        scales=read_scales(options),
        max_queue=options.max_queue,
        batch_wait=options.batch_wait,
        max_count=options.max_count,
        num_steps=options.num_steps,
        guidance_scale=options.guidance_scale,
        timeout=options.timeout,
        examples=examples,
        watch=0.0 if options.nowatch else DEFAULTS.watch,
    )


def read_scales(options: argparse.Namespace) -> dict[str, Scale]:
    """A scale for every deployment that the options name."""
    replicas, cpus, gpus = dict(options.replicas), dict(options.cpus), dict(options.gpus)
    scales = {}
    for name in {**replicas, **cpus, **gpus}:
        least, _, most = replicas.get(name, "1").partition("-")
        try:
            least, most = int(least), int(most or least)
            reserved = {
                "cpus": float(cpus.get(name, _cpus(name))),
                "gpus": float(gpus.get(name, 0)),
            }
        except ValueError as error:
            raise ValueError(f"{name}: {error}. {EPILOG}") from error
        if not 1 <= least <= most or min(reserved.values()) < 0:
            raise ValueError(
                f"{name} has 1 or more replicas, MIN not above MAX, and reserves nothing below 0. "
                f"Received: {least}-{most}, {reserved}"
            )
        scales[name] = Scale(least, most, **reserved)
    return scales


def _cpus(name: str) -> float:
    return 1.0 if name == "diffusion_model" else Scale.cpus


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"DEPLOYMENT=VALUE is wanted. Received: {text!r}")
    return name, value
