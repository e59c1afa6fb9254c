"""`sd-tf export`: write a checkpoint as SavedModels, verified before publication."""

import argparse
import sys
import time

from sd_tf.cli.options import ADDITIONS, EXPORT, OPENING, PLACES, SHAPE, chosen, opened
from sd_tf.cli.options import add_arguments as add_options
from sd_tf.config import family_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, EXPORT)


def run(options: argparse.Namespace) -> int:
    from sd_tf.export import ExportOptions, export

    start = time.perf_counter()
    checkpoint = opened(options, options.checkpoint, (*OPENING, *ADDITIONS))
    print(f"{checkpoint.source}: {checkpoint.format}, {family_of(checkpoint.config)}", flush=True)
    for adapter in checkpoint.adapters:
        print(f"with {adapter.name} at {adapter.scale:g}", flush=True)
    for net in checkpoint.controlnets:
        print(f"steered by {net}", flush=True)
    for adapter in checkpoint.image_adapters:
        print(f"pictures as prompts by {adapter}", flush=True)
    manifest = export(
        checkpoint,
        options.output_dir,
        ExportOptions(
            **chosen(options, SHAPE),
            **chosen(options, PLACES),
            precision=options.precision,
            storage=options.storage,
            max_steps=options.max_steps,
            guidance=options.guidance,
            guidance_rescale=options.guidance_rescale,
            prompt_chunks=options.prompt_chunks,
            jit_compile_text_encoder=options.jit_compile_text_encoder,
            target=options.target,
            disabled_rewrites=options.disable_rewrites,
            components=options.components,
            text_to_image=options.text_to_image,
            verify=options.verify,
            overwrite=options.overwrite,
        ),
        progress(start),
    )
    names = options.components or manifest.components
    target = manifest.components[next(iter(names))].target
    print(
        f"{options.output_dir}: {manifest.shapes}, {manifest.precision}, "
        f"up to {manifest.max_steps} steps, for a {target}, in {time.perf_counter() - start:.1f} s"
    )
    return 0


def progress(start: float):
    """Report a line for each finished component; on a terminal, also the work in progress."""
    live = sys.stdout.isatty()

    def report(component, text):
        line = f"[{time.perf_counter() - start:7.1f} s] {component}: {text}"
        if text.startswith("done"):
            print(f"\r{line:<100}" if live else line, flush=True)
        elif live:
            print(f"\r{line:<100}", end="", flush=True)

    return report
