"""TensorFlow Serving: write a folder to copy to the server's machine, and check such a folder.

    FOLDER/
      models/<component>/<version>/   the SavedModels; warm-up requests in assets.extra, and
                                      batching_params.pbtxt if the server may batch
      client/<version>/               pipeline.json and tokenizer, which a client needs
      models.config  monitoring.config  batching.config
      compose.yaml  kubernetes.yaml  README.md
      serving.json                    the settings of the folder

`publish` writes it, and `check` reads it as the server would. Where a decision rests on the
server's behaviour, the place in its source is named.
"""

from sd_tf.serving.errors import ServingError

__all__ = ["ServingError"]
