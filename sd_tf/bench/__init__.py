"""Measure exports, alone and beside other engines."""
