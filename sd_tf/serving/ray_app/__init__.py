"""The Ray Serve application: an export's models as deployments that scale apart, and their front.

The front puts pictures of several callers into batches and walks from model to model; the models
keep nothing between two calls. So a replica that dies costs a repeated call, no picture.
"""
