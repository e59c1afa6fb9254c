"""OpenAI's images API, with the fields of a call beside its own, for clients that speak it.

It takes part in the front's queue and limits like POST /generate, and gives the same pictures.
"""
