"""`sd-tf serve ray --export_dir …`: run the Ray Serve application."""

import argparse
import os
import signal
import threading
from pathlib import Path

from sd_tf.cli.arguments import (
    SHAPES,
    Switch,
    add_compile_cache,
    add_export_dir,
    add_jit_compile,
    report,
    shapes,
)
from sd_tf.runtime.compile_cache import for_workers
from sd_tf.runtime.manifest import Manifest
from sd_tf.serving.errors import ServingError
from sd_tf.serving.ray_app.access import read_key, read_origin
from sd_tf.serving.ray_app.settings import MOST_BODY, Scale, Settings

DEFAULTS = Settings(export_dir="")
LAST_PORT = 65535
EPILOG = """\
--replicas diffusion_model=1-4 scales between 1 and 4 with the load, decoder=2 keeps two; the
deployments are front and the components of the export. On a cluster the export folder and sd_tf
have to be at the same place on every node.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_export_dir(parser)
    parser.add_argument("--address", help="of a Ray cluster, or auto (default: a Ray of its own)")
    parser.add_argument("--detach", action="store_true", help="with --address: deploy and return")
    parser.add_argument(
        "--host", default=DEFAULTS.host, help="for HTTP and gRPC; 0.0.0.0: all interfaces"
    )
    for name in ("http_port", "grpc_port"):
        default = getattr(DEFAULTS, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"to listen on (default: {default})"
        )
    parser.add_argument(
        "--allow_origin",
        action="append",
        default=[],
        metavar="https://HOST",
        help="a name of this server, or another site whose pages may call it; may be repeated",
    )
    parser.add_argument(
        "--api_key_file", metavar="FILE", help="its key is needed for all calls over HTTP and gRPC"
    )
    parser.add_argument("--metrics_port", type=int, help="for Prometheus (default: Ray chooses)")
    for name, unit, about in (
        ("replicas", "N or MIN-MAX", "how many of a deployment there are (default: 1)"),
        ("cpus", "NUMBER", "cores that each of its replicas reserves"),
        ("gpus", "NUMBER", "GPUs that each of its replicas reserves (default: 0)"),
    ):
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar=f"DEPLOYMENT={unit}",
            type=_pair,
            help=f"{about}; may be repeated",
        )
    add_jit_compile(parser)
    add_compile_cache(parser)
    parser.add_argument(
        "--warm_up",
        type=shapes,
        metavar=SHAPES,
        help="the shapes that are compiled before the application is ready (default: all)",
    )
    parser.add_argument(
        "--warm_up_all",
        action="store_true",
        help="also compile what only TensorFlow Serving's clients call (seeded, from_noise, …)",
    )
    parser.add_argument(
        "--num_steps", type=int, default=DEFAULTS.num_steps, help="of a call that gives none"
    )
    parser.add_argument(
        "--guidance_scale",
        type=float,
        default=DEFAULTS.guidance_scale,
        help="of a call that gives none",
    )
    parser.add_argument(
        "--max_queue", type=int, default=DEFAULTS.max_queue, help="the most pictures that wait"
    )
    parser.add_argument(
        "--max_count", type=int, default=DEFAULTS.max_count, help="the most pictures of a call"
    )
    parser.add_argument(
        "--max_body",
        type=int,
        help="MiB of a TensorFlow Serving call (default: 64, or more where the export needs more)",
    )
    parser.add_argument(
        "--batch_wait", type=float, default=DEFAULTS.batch_wait, help="seconds for a batch to fill"
    )
    parser.add_argument("--timeout", type=float, default=DEFAULTS.timeout, help="seconds of a call")
    parser.add_argument("--examples", help="text file: prompts that the page offers")
    parser.add_argument(
        "--watch", action=Switch, default=True, help="serve a newer export as soon as it is there"
    )
    parser.add_argument(
        "--keep_old",
        type=float,
        default=DEFAULTS.keep_old,
        help="seconds that an export can still be called after a newer one was taken up",
    )


def run(options: argparse.Namespace) -> int:
    settings = read_settings(options)
    import ray
    from ray import serve

    from sd_tf.serving.ray_app.application import NAME, build, with_scales
    from sd_tf.serving.ray_app.held import sweep
    from sd_tf.serving.ray_app.listen import address, check_free
    from sd_tf.serving.ray_app.start import deploy, nodes_of, unplaceable, unused_gpus

    application = build(settings)
    scales = with_scales(settings, list(Manifest.read(settings.export_dir).parts)).scales
    if options.address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        check_free(settings.host, settings.http_port, settings.grpc_port)
        where = {
            "address": "local",
            "include_dashboard": False,
            "_metrics_export_port": options.metrics_port,
        }
    else:
        where = {"address": options.address}
    is_ready = is_begun = was_there = False

    def leave_nothing() -> None:
        """Delete what was begun; an application that ran before stays."""
        ours = is_ready or (is_begun and not was_there and options.address is not None)
        if ours and NAME in serve.status().applications:
            serve.delete(NAME)

    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
        ray.init(**where, log_to_driver=False)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set its own
        was_there = options.address is not None and NAME in serve.status().applications
        if options.address is not None and not was_there:
            # Its fronts would share the ports with new ones.
            check_free(settings.host, settings.http_port, settings.grpc_port)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        problems = unplaceable(scales, nodes)
        if problems and options.address is None:  # this Ray will not grow
            raise ServingError(f"{'; '.join(problems)}. Lower --cpus or --gpus, or give --address.")
        for problem in problems:
            report(f"waiting for a node: {problem}")
        if unused_gpus(scales, nodes):
            report(
                "the models run on the CPU: there is a GPU, but no deployment reserves a part of "
                "it (--gpus diffusion_model=0.7 --gpus decoder=0.1 …)"
            )
        serve.start(proxy_location="Disabled")  # the fronts listen themselves
        report("loading and compiling …")
        is_begun = True
        fronts = nodes_of(deploy(application, NAME, report))
        is_ready = True
        report(
            f"the page: http://{address(settings.host, settings.http_port)}   TensorFlow "
            f"Serving's API: grpc://{address(settings.host, settings.grpc_port)}   "
            f"on {', '.join(fronts)}"
        )
        if not options.detach:
            threading.Event().wait()
    except (KeyboardInterrupt, SystemExit):  # the second is Ray's, while it starts
        leave_nothing()  # a Ray of its own ends with what has started; a cluster goes on
        if not is_ready:
            report("stopped before the application was ready")
            return 1
    except ServingError:
        leave_nothing()
        raise
    finally:
        ray.shutdown()
        sweep(Path(settings.export_dir))
    return 0


def read_settings(options: argparse.Namespace) -> Settings:
    if options.detach and options.address is None:
        raise ValueError("--detach goes with --address: a Ray of its own ends with this command.")
    if options.address is not None and options.metrics_port is not None:
        raise ValueError(
            "--metrics_port goes without --address: a cluster's is set by `ray start "
            "--metrics-export-port`."
        )
    _check_ports(options)
    for name in ("max_queue", "max_count", "max_body"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is at least 1. Received: {value}")
    for name in ("batch_wait", "timeout", "keep_old"):
        if not getattr(options, name) >= 0:
            raise ValueError(f"--{name} is at least 0. Received: {getattr(options, name)}")
    if options.timeout == 0:
        raise ValueError("--timeout is above 0. Received: 0")
    if options.max_body is not None and options.max_body > MOST_BODY:
        raise ValueError(f"--max_body is at most {MOST_BODY}. Received: {options.max_body}")
    if options.max_count > options.max_queue:
        raise ValueError(
            f"--max_count is at most --max_queue, {options.max_queue}: larger calls would always "
            f"be refused. Received: {options.max_count}"
        )
    Manifest.read(options.export_dir)
    examples = ()
    if options.examples is not None:
        lines = Path(options.examples).read_text(encoding="utf-8").splitlines()
        examples = tuple(line.strip() for line in lines if line.strip())
    return Settings(
        export_dir=str(Path(options.export_dir).resolve()),
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        allow_origin=tuple(read_origin(origin) for origin in options.allow_origin),
        api_key_hash=None if options.api_key_file is None else read_key(options.api_key_file),
        jit_compile=options.jit_compile,
        compile_cache=for_workers(options.compile_cache, are_here=options.address is None),
        warm_up=options.warm_up,
        warm_up_all=options.warm_up_all,
        scales=read_scales(options),
        max_queue=options.max_queue,
        batch_wait=options.batch_wait,
        max_count=options.max_count,
        max_body=options.max_body,
        num_steps=options.num_steps,
        guidance_scale=options.guidance_scale,
        timeout=options.timeout,
        examples=examples,
        watch=DEFAULTS.watch if options.watch else 0.0,
        keep_old=options.keep_old,
    )


def _check_ports(options: argparse.Namespace) -> None:
    names: dict[int, str] = {}
    for name in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(options, name)
        if port is None:
            continue
        if not 1 <= port <= LAST_PORT:
            raise ValueError(f"--{name} is a port from 1 to {LAST_PORT}. Received: {port}")
        if port in names:
            raise ValueError(f"--{name} is another port than --{names[port]}. Received: {port}")
        names[port] = name


def read_scales(options: argparse.Namespace) -> dict[str, Scale]:
    """Return a scale for every deployment that the options name."""
    replicas, cpus, gpus = dict(options.replicas), dict(options.cpus), dict(options.gpus)
    scales = {}
    for name in {**replicas, **cpus, **gpus}:
        least, _, most = replicas.get(name, "1").partition("-")
        try:
            least, most = int(least), int(most or least)
            reserved = {
                "cpus": float(cpus.get(name, Scale.of(name).cpus)),
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


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"takes DEPLOYMENT=VALUE. Received: {text!r}")
    return name, value
