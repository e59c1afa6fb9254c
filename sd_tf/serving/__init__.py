"""Exports behind a server, and what talks to one; `sd-tf serve` lists the commands."""
