"""The Ray Serve application: a deployment for each of an export's models, and one for the front.

The front puts pictures of several callers into batches and calls one model after the other. Models
keep nothing between calls: if a replica dies, its call is repeated on another, and no picture is
lost.
"""
