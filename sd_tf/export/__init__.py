"""Export a checkpoint as verified SavedModels and a manifest, published together or not at all."""

from sd_tf.export.exporter import export
from sd_tf.export.options import ExportOptions

__all__ = ["ExportOptions", "export"]
