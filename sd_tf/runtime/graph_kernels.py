"""Exports whose products TensorFlow's own kernels compute, and not XLA: bfloat16 on CPUs.

oneDNN's kernels take bfloat16 as it is, where the processor does; XLA's widen it.
"""

import logging
import os
from pathlib import Path

from sd_tf.runtime.manifest import ExportError, Manifest

REWRITE = "graph_kernels"  # of `config.rewrites`
KEEPS_WEIGHTS = "TF_ONEDNN_ASSUME_FROZEN_WEIGHTS"  # read once, when a process first computes
PROCESSOR = Path("/proc/cpuinfo")
TAKES_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is ARM's

logger = logging.getLogger(__name__)


class FixedWeightsError(ExportError):
    """An export whose weights may change, in a process that takes all weights for fixed."""


def is_in_graph(manifest: Manifest, component: str) -> bool:
    """Whether a component's signatures run in TensorFlow's graph, which is worth optimizing."""
    return REWRITE in manifest.components[component].rewrites


def keep_weights(manifest: Manifest) -> None:
    """Let oneDNN keep its own copies of weights, in this process, if the export gains from it.

    No weights may change in the process then: places for adapters rule it out. Nor does it go with
    kernels in fewer bits, whose copies would have all.
    """
    gains = any(is_in_graph(manifest, name) for name in manifest.parts)
    if gains and not manifest.adapters.slots and not manifest.storage:
        os.environ.setdefault(KEEPS_WEIGHTS, "1")


def keeps_weights() -> bool:
    """Whether this process has oneDNN keep its own copies of weights."""
    return os.environ.get(KEEPS_WEIGHTS, "0").lower() not in ("", "0", "false")


def check_weights_change(manifest: Manifest) -> None:
    """Refuse an export with places for adapters where kernels would not see them filled."""
    if manifest.adapters.slots and keeps_weights():
        raise FixedWeightsError(
            f"The export has places for adapters, which change its weights, and {KEEPS_WEIGHTS} "
            f"says that none change in this process: unset it, or load the export in another "
            f"process."
        )


def tell_widening(manifest: Manifest) -> None:
    """Log a warning if this processor computes an export's bfloat16 in software."""
    if any(is_in_graph(manifest, name) for name in manifest.parts):
        tell_software()


def tell_software() -> None:
    """Log a warning if this processor has no instructions for bfloat16, as far as is known."""
    flags = PROCESSOR.read_text().split() if PROCESSOR.is_file() else TAKES_BFLOAT16
    if not set(TAKES_BFLOAT16) & set(flags):
        logger.warning(
            "The export computes in bfloat16 on the CPU, and this one has no instructions for it "
            "(%s): it does so in software. float32 is faster here: export with "
            "--precision float32.",
            " or ".join(TAKES_BFLOAT16),
        )
