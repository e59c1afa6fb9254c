"""Exports behind a server, and what talks to one; `python -m sd_tf.serving` lists the commands."""
