"""TensorFlow Serving: a folder to copy to its machine, and a check of such a folder.

    FOLDER/
      models/<component>/<version>/   the SavedModels; in assets.extra the warm-up requests,
                                      and batching_params.pbtxt where the server may batch
      client/<version>/               pipeline.json and tokenizer: what a client needs
      models.config  monitoring.config  batching.config
      compose.yaml  kubernetes.yaml  README.md
      serving.json                    what the folder was written with

`publish` writes it, `check` reads it as the server would. What the server does was read in its
source; the places are named where a decision rests on them.
"""


class ServingError(ValueError):
    """A folder that cannot be written or served: the rule, what was received, how to mend it."""
