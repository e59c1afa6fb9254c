"""Export a checkpoint as XLA-compiled TensorFlow SavedModels, verified before publication.

python serialize_savedmodels.py --checkpoint=path/to/folder --output_dir=exports/mine
"""

from sd_tf.cli import export, options, script

options.define_flags(options.EXPORT)

if __name__ == "__main__":
    script.run(export, options.EXPORT)
