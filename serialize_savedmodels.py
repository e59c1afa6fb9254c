"""Checkpoint → XLA-compiled TensorFlow SavedModels, verified and published at once.

python serialize_savedmodels.py --checkpoint=path/to/folder --output_dir=exports/mine
"""

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from absl import app, flags, logging

from sd_tf.config import FAMILIES, SAMPLERS, ConfigError

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "checkpoint",
    "tiny",
    "Diffusers folder, .safetensors file, Hugging Face Hub id, kerascv:sd1.4, kerascv:sd2.1, "
    "kerascv:FOLDER, or an embedded one: tiny draws scenes, tiny-edit changes them as it is told.",
)
flags.DEFINE_string("output_dir", "exports/tiny", "Where the export is put.")
flags.DEFINE_integer("batch_size", 1, "Pictures per call.")
flags.DEFINE_integer("height", None, "Pixels. Default: the size that the model was made for.")
flags.DEFINE_integer("width", None, "Pixels. Default: the size that the model was made for.")
flags.DEFINE_enum("precision", "float32", ["float32", "bfloat16", "float16"], "Of the models.")
flags.DEFINE_integer("max_steps", 100, "The most steps that a call can ask for.")
flags.DEFINE_enum("scheduler", None, list(SAMPLERS), "The default one. Default: the checkpoint's.")
flags.DEFINE_enum(
    "guidance",
    "classifier_free",
    ["classifier_free", "none"],
    "none: one model call per step, for Turbo and LCM checkpoints.",
)
flags.DEFINE_float("guidance_rescale", 0.0, "0…1: pulls guided contrast back to the unguided one.")
flags.DEFINE_bool("jit_compile_text_encoder", False, "Have XLA compile the text encoder too.")
flags.DEFINE_enum(
    "target", None, ["cpu", "gpu", "tpu"], "What to write the graphs for. Default: this machine."
)
flags.DEFINE_list(
    "disable_rewrites", [], "Of the target's rewrites, those to leave out. See docs/performance.md."
)
flags.DEFINE_list(
    "components",
    ["text_encoder", "diffusion_model", "decoder", "image_encoder"],
    "Which to export; fewer than all replace those of an existing export.",
)
flags.DEFINE_enum(
    "verify",
    "full",
    ["full", "fast", "off"],
    "Compare models and SavedModels: plain and compiled, plain alone, or not at all.",
)
flags.DEFINE_bool("overwrite", False, "Replace an existing export.")
flags.DEFINE_enum("family", None, list(FAMILIES), "What a single SD2 file cannot tell.")
flags.DEFINE_string("variant", None, "Which weights of a folder or of the Hub: fp16, non_ema.")
flags.DEFINE_string("revision", None, "Branch, tag or commit on the Hub.")
flags.DEFINE_bool("ema", False, "Take a single file's averaged UNet weights.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # TensorFlow tells much while it saves
    from sd_tf.checkpoints import EMBEDDED
    from sd_tf.export import Options, export
    from sd_tf.manifest import ExportError
    from sd_tf.weights import CheckpointError, open_checkpoint

    start = time.perf_counter()
    try:
        checkpoint = open_checkpoint(
            EMBEDDED.get(FLAGS.checkpoint, FLAGS.checkpoint),
            family=FLAGS.family,
            scheduler=FLAGS.scheduler,
            variant=FLAGS.variant,
            revision=FLAGS.revision,
            ema=FLAGS.ema,
        )
        print(f"{checkpoint.source}: {checkpoint.format}, {checkpoint.config.family}", flush=True)
        manifest = export(
            checkpoint,
            FLAGS.output_dir,
            Options(
                batch_size=FLAGS.batch_size,
                height=FLAGS.height,
                width=FLAGS.width,
                precision=FLAGS.precision,
                max_steps=FLAGS.max_steps,
                guidance=FLAGS.guidance,
                guidance_rescale=FLAGS.guidance_rescale,
                jit_compile_text_encoder=FLAGS.jit_compile_text_encoder,
                target=FLAGS.target,
                disabled_rewrites=tuple(FLAGS.disable_rewrites),
                components=tuple(FLAGS.components),
                verify=FLAGS.verify,
                overwrite=FLAGS.overwrite,
            ),
            progress(start),
        )
    except (CheckpointError, ConfigError, ExportError) as error:
        print(f"serialize_savedmodels.py: {error}", file=sys.stderr)
        sys.exit(1)
    print(
        f"{FLAGS.output_dir}: {manifest.batch_size} × {manifest.height}×{manifest.width} px, "
        f"{manifest.precision}, up to {manifest.max_steps} steps, "
        f"in {time.perf_counter() - start:.1f} s"
    )


def progress(start):
    """A line for each thing that is done; on a terminal, what is being done meanwhile."""
    live = sys.stdout.isatty()

    def report(component, text):
        line = f"[{time.perf_counter() - start:7.1f} s] {component}: {text}"
        if text.startswith("done"):
            print(f"\r{line:<100}" if live else line, flush=True)
        elif live:
            print(f"\r{line:<100}", end="", flush=True)

    return report


if __name__ == "__main__":
    app.run(main)
