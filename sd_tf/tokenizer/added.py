"""Tokens behind the vocabulary, as textual inversion adds them, and those of several vectors.

A token of n vectors is n added tokens: `<cat>`, `<cat>_1`, … `<cat>_{n-1}`, by diffusers'
convention. In a prompt the first one stands for all of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from sd_tf.tokenizer.errors import TokenizerError

Vectors = Mapping[int, tuple[int, ...]]  # the first token's id → the ids of all vectors


class Piece(NamedTuple):
    """One id of an encoded text."""

    id: int
    start: int  # where its token begins in the text
    vector: int = 0  # its place among the ids that one token stands for


def vectors_of(backend: Tokenizer) -> dict[int, tuple[int, ...]]:
    """Find the added tokens of several vectors."""
    ids = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
    found = {ids[name]: tuple(_numbered(name, ids)) for name in ids}
    return {first: vectors for first, vectors in found.items() if len(vectors) > 1}


def _numbered(name: str, ids: Mapping[str, int]) -> Iterator[int]:
    """Give the id of a token, and of those that its name with 1, 2, … behind it names."""
    number = 0
    while (place := name if number == 0 else f"{name}_{number}") in ids:
        yield ids[place]
        number += 1


def expanded(ids: Sequence[int], starts: Iterable[int], vectors: Vectors) -> list[Piece]:
    """Put all vectors in the place of each token of several.

    A token with its second vector behind it stays: there, the prompt's writer has expanded it.
    """
    pieces = []
    for one, start, following in zip(ids, starts, [*ids[1:], None], strict=False):
        several = vectors.get(one)
        if several is None or following == several[1]:
            several = (one,)
        pieces += [Piece(each, start, number) for number, each in enumerate(several)]
    return pieces


def add_tokens(backend: Tokenizer, counts: Mapping[str, int]) -> None:
    """Add tokens to the end of the vocabulary, each with its number of vectors.

    Texts are searched for them in lower case, and inside words, too.
    """
    expected = vectors_of(backend)
    for token, count in counts.items():
        _check_name(backend, token)
        ids = range(backend.get_vocab_size(), backend.get_vocab_size() + count)
        names = [token, *(f"{token}_{number}" for number in range(1, count))]
        for name, index in zip(names, ids, strict=True):
            _check_free(backend, name)
            backend.add_tokens([AddedToken(name, normalized=True)])
            if backend.token_to_id(name) != index:
                raise TokenizerError(
                    f"The ids of a tokenizer must be those from 0 to the number of its tokens, "
                    f"{index}. Its next free id is {backend.token_to_id(name)}: tokens are missing."
                )
            _check_found(backend, name, index)
        if count > 1:
            expected[ids[0]] = tuple(ids)
    for first, vectors in vectors_of(backend).items():
        if vectors != expected.get(first):
            token, last = backend.id_to_token(first), backend.id_to_token(vectors[-1])
            raise TokenizerError(
                f"The token {last!r} would be read as a further vector of {token!r}, because "
                f"vectors are called TOKEN, TOKEN_1, TOKEN_2, …. Choose another token."
            )


def _check_name(backend: Tokenizer, token: str) -> None:
    if not token or any(character.isspace() for character in token):
        raise TokenizerError(
            f"A token must have characters, and no white space. Received: {token!r}. Choose "
            f"another token."
        )


def _check_found(backend: Tokenizer, name: str, index: int) -> None:
    """Refuse a name that holds a special token: that one is looked for before all others."""
    encoding = backend.encode(name, add_special_tokens=False)
    if encoding.ids != [index]:
        raise TokenizerError(
            f"A token must be found in a text, and must not hold a special token, such as the "
            f"padding. Received: {name!r}, which is read as "
            f"{', '.join(map(repr, encoding.tokens))}. Choose another token, such as '<my-style>'."
        )


def _check_free(backend: Tokenizer, name: str) -> None:
    """Refuse a name that the tokenizer reads as one token already: all prompts would change."""
    encoding = backend.encode(name, add_special_tokens=False)
    if len(encoding.ids) == 1:
        known = backend.id_to_token(encoding.ids[0])
    elif backend.token_to_id(name) is not None:
        known = name
    else:
        return
    raise TokenizerError(
        f"A token must be new to the tokenizer, in lower case, too. Received: {name!r}, which is "
        f"read as {known!r}. Choose another token, such as '<my-style>'."
    )
