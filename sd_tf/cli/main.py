"""The table of the commands of `sd-tf`."""

import sys
from collections.abc import Sequence

from sd_tf.cli.dispatch import Command, Group, dispatch

TENSORFLOW = {"KERAS_BACKEND": "tensorflow"}
JAX = {"KERAS_BACKEND": "jax"}

COMMANDS = {
    "export": Command(
        "sd_tf.cli.export", "write a checkpoint as SavedModels, verified", TENSORFLOW
    ),
    "export-adapters": Command(
        "sd_tf.cli.export_adapters", "write adapters (LoRA) into an export's places", TENSORFLOW
    ),
    "benchmark": Command(
        "sd_tf.cli.benchmark", "time an export, and KerasCV's pipeline beside it", TENSORFLOW
    ),
    "generate": Command("sd_tf.cli.generate", "make pictures with an export", TENSORFLOW),
    "control": Command(
        "sd_tf.cli.control", "make the picture that a ControlNet follows", extra="control"
    ),
    "weights": Command(
        "sd_tf.cli.weights", "describe a checkpoint, an adapter or a ControlNet; would it load?"
    ),
    "checkpoints": Command(
        "sd_tf.cli.checkpoints", "write a random checkpoint of a real release's size"
    ),
    "serve": Group(
        "put exports behind a server",
        {
            "ray": Command("sd_tf.cli.serve_ray", "serve an export with Ray Serve, and its page"),
            "tf_serving": Command(
                "sd_tf.cli.serve_tf_serving", "write a folder for TensorFlow Serving, or check one"
            ),
            "client": Command("sd_tf.cli.serve_client", "make pictures with a server's models"),
            "batch": Command(
                "sd_tf.cli.serve_batch", "make the pictures of a file of prompts, on Ray"
            ),
            "load": Command("sd_tf.cli.serve_load", "measure the load that an application takes"),
        },
        "serve",
    ),
    "train": Group(
        "train, write training data, and measure what was trained",
        {
            "tiny": Command("sd_tf.cli.train_tiny", "train the embedded checkpoint anew"),
            "text_to_image": Command(
                "sd_tf.cli.train_text_to_image", "fine-tune a checkpoint on captioned pictures"
            ),
            "instruct_pix2pix": Command(
                "sd_tf.cli.train_instruct_pix2pix",
                "teach a checkpoint to follow instructions, from pairs of pictures",
            ),
            "controlnet": Command(
                "sd_tf.cli.train_controlnet",
                "train a ControlNet, from pictures to follow and pictures to draw",
            ),
            "small_decoder": Command(
                "sd_tf.cli.train_small_decoder",
                "train a small decoder of a checkpoint's latents, for previews",
            ),
            "memory": Command(
                "sd_tf.cli.train_memory",
                "estimate fine-tuning's memory and time on a TPU slice, without the slice",
                JAX,
                "tpu",
            ),
            "eval": Command(
                "sd_tf.cli.train_eval", "measure how often an export draws what a prompt asks for"
            ),
            "eval_edits": Command(
                "sd_tf.cli.train_eval_edits",
                "measure how often an export edits as instructed, and changes no more",
            ),
            "eval_control": Command(
                "sd_tf.cli.train_eval_control",
                "measure how often an export follows an outline drawing",
            ),
            "tiny_dit": Command("sd_tf.cli.train_tiny_dit", "train the embedded transformer anew"),
            "tiny_adapter": Command(
                "sd_tf.cli.train_tiny_adapter", "train an adapter of the embedded checkpoint anew"
            ),
            "tiny_control": Command(
                "sd_tf.cli.train_tiny_control", "train the embedded ControlNet anew"
            ),
            "edit_pairs": Command(
                "sd_tf.cli.train_edit_pairs",
                "write the tiny world's edits as parquet: pairs with a known truth",
            ),
        },
        "train",
    ),
    "jax": Group(
        "compile ahead of time, and draw with what was compiled",
        {
            "compile": Command(
                "sd_tf.cli.jax_compile",
                "compile a checkpoint for this machine, or for a TPU slice elsewhere",
                JAX,
            ),
            "generate": Command(
                "sd_tf.cli.jax_generate", "make pictures with what was compiled", JAX
            ),
        },
        "jax",
    ),
    "bench": Group(
        "measure exports beside other engines",
        {
            "peers": Command(
                "sd_tf.cli.bench_peers",
                "compare with KerasCV, PyTorch, OpenVINO and JAX on the same weights",
                TENSORFLOW,
            ),
            "scaling": Command(
                "sd_tf.cli.bench_scaling",
                "measure pictures per second by batch and size",
                TENSORFLOW,
            ),
            "training": Command(
                "sd_tf.cli.bench_training",
                "compare the trainer's examples per second with PyTorch's, on the same UNet",
                TENSORFLOW,
            ),
            "denoisers": Command(
                "sd_tf.cli.bench_denoisers",
                "time a call of SD3's or Flux's transformer beside PyTorch and OpenVINO",
                TENSORFLOW,
            ),
            "starts": Command(
                "sd_tf.cli.bench_starts",
                "measure an export's start-up with and without a cache, and the host's share",
                TENSORFLOW,
            ),
            "soak": Command(
                "sd_tf.cli.bench_soak",
                "kill the Ray application's replicas and replace its export, under load",
                TENSORFLOW,
                "serve",
            ),
        },
        "bench",
    ),
}


ABOUT = "Stable Diffusion as XLA-compiled SavedModels: export, draw, measure, serve, train."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    return dispatch("sd-tf", ABOUT, COMMANDS, sys.argv[1:] if argv is None else argv)
