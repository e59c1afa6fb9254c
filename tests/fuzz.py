"""Cases for tests with damaged and hostile input."""

import json

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# The same cases in every run, so that a failure is a change's and can be repeated.
FEW, MANY = (
    settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for count in (300, 1500)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@st.composite
def changed(draw, content):
    """JSON with one value, at any depth, replaced or removed."""
    content = json.loads(json.dumps(content))
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
        elif draw(st.booleans()):
            place[key] = draw(JSON)
            return content
        else:
            del place[key]
            return content


@st.composite
def damaged(draw, content: bytes):
    """Bytes of which some are others, missing or too many."""
    start = draw(st.integers(0, len(content)))
    stop = draw(st.integers(start, min(len(content), start + 8)))
    return content[:start] + draw(st.binary(max_size=8)) + content[stop:]
