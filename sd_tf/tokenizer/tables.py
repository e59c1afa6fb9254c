"""A CLIP tokenizer as NumPy tables, for an implementation that cannot call `tokenizers`.

Everything is read off the tokenizer, so that any vocabulary, padding and added tokens will do. The
rules that are not tables have to be CLIP's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from sd_tf.tokenizer.added import Vectors
from sd_tf.tokenizer.characters import (
    CODE_POINTS,
    NUMBER,
    PAGE,
    SPACE,
    Characters,
    Composition,
    PagedTable,
    characters,
)
from sd_tf.tokenizer.clip import (
    END,
    START,
    WORD_END,
    WORDS,
    ClipTokenizer,
    TokenizerError,
    byte_alphabet,
)

# The rules of CLIP, as `tokenizers` writes them. The words' expression names the start and the end
# token in files of ours and of transformers 5, and does not in older ones.
NAMES = r"<\|startoftext\|>|<\|endoftext\|>|"
NAMED = {WORDS: (START, END), WORDS.removeprefix(NAMES): ()}
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Lowercase"},
    ],
}
MODEL = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": WORD_END,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}

# Numbers behind Unicode, which stand in a text as if they were characters.
TEXT_END = CODE_POINTS
FIRST_TOKEN = TEXT_END + 1  # special and added tokens
# A character's properties in one int32: bits, and above them the way to its lower case.
CLASS_BITS = 0b111
TOKEN = NUMBER + 1  # a token's class, beside those of `characters`
IRREGULAR = 1 << 3
STARTS = (1 << 4, 1 << 5, 1 << 6)  # by root: whether the trie has a text that begins so
LOWER_SHIFT = 7

RAW, NORMALIZED, PHRASE = range(3)  # the trie's roots
SPLIT, WHOLE = range(2)  # a phrase's value: whether its characters are words by class, or one word


@dataclass(frozen=True)
class Trie:
    """Texts to find, as steps from a state to the next one over a character."""

    states: np.ndarray  # (steps,)
    characters: np.ndarray  # (steps,)
    next_states: np.ndarray  # (steps,)
    values: np.ndarray  # (states,): the value of the text that ends in this state, or -1


@dataclass(frozen=True)
class Merges:
    """Byte-pair encoding: the ids that join, and the id that they become, by rank."""

    left: np.ndarray
    right: np.ndarray
    merged: np.ndarray


@dataclass(frozen=True)
class TokenizerTables:
    """Everything that a CLIP tokenizer's ids depend on, except for their number."""

    properties: PagedTable  # of characters and the numbers behind Unicode
    grown: Mapping[int, int]  # letter → the second code point of its lower case
    composition: Composition
    trie: Trie  # from RAW and NORMALIZED to a token's number, from PHRASE to SPLIT or WHOLE
    token_ids: np.ndarray  # (tokens,): the id of each token that is found in texts
    vectors: Vectors  # the tokens of several vectors: the first one's id → the ids of all
    finds_normalized: bool  # whether some tokens are found in normalized texts
    words: list[str]  # the words that are one token each
    word_ids: np.ndarray  # (words,)
    byte_ids: np.ndarray  # (512,): ids of the bytes inside a word, then at its end
    merges: Merges
    start_id: int
    end_id: int
    pad_id: int


def tables_of(tokenizer: ClipTokenizer) -> TokenizerTables:
    """Read all tables off a tokenizer; refuse one that follows other rules than CLIP's."""
    backend = tokenizer.backend
    rules = json.loads(backend.to_str())
    named = _check_rules(rules)
    byte_ids = _byte_ids(rules["model"])
    start_id, end_id = _frame(backend)
    raw, normalized, token_ids = _tokens(rules["added_tokens"], backend)
    phrases = dict.fromkeys(CONTRACTIONS, WHOLE) | dict.fromkeys(named, SPLIT)
    texts = (raw, normalized, phrases)
    words, word_ids = _whole_words(rules["model"]["vocab"], backend)
    return TokenizerTables(
        properties=_properties(characters(), texts, len(token_ids)),
        grown=characters().grown,
        composition=characters().composition,
        trie=_trie(texts),
        token_ids=token_ids,
        vectors=tokenizer.vectors,
        finds_normalized=bool(normalized),
        words=words,
        word_ids=word_ids,
        byte_ids=byte_ids,
        merges=_merges(rules["model"]),
        start_id=start_id,
        end_id=end_id,
        pad_id=tokenizer.pad_token_id,
    )


def _check_rules(rules: dict) -> tuple[str, ...]:
    """Compare the rules with CLIP's; return the tokens that the words' expression names."""
    model = rules["model"] | {
        "continuing_subword_prefix": rules["model"].get("continuing_subword_prefix") or ""
    }
    for key, value in MODEL.items():
        _require_rule(f"model's {key}", value, model.get(key))
    _require_rule("normalizer", NORMALIZER, rules["normalizer"])
    found = rules["pre_tokenizer"] or {}
    steps = found.get("pretokenizers") or [{}]
    expression = steps[0].get("pattern", {}).get("Regex")
    expression = expression if expression in NAMED else WORDS
    _require_rule("pre_tokenizer", _pre_tokenizer(expression), _without_offsets(found))
    return NAMED[expression]


def _pre_tokenizer(expression: str) -> dict:
    split = {"type": "Split", "pattern": {"Regex": expression}}
    return {
        "type": "Sequence",
        "pretokenizers": [
            {**split, "behavior": "Removed", "invert": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ],
    }


def _without_offsets(rules: dict) -> dict:
    """Leave out what has no effect on ids."""
    steps = [
        {key: value for key, value in step.items() if key != "trim_offsets"}
        for step in rules.get("pretokenizers", [])
    ]
    return rules | {"pretokenizers": steps}


def _require_rule(name: str, expected, found) -> None:
    if found != expected:
        raise TokenizerError(
            f"The tokenizer's {name} must be that of CLIP, {json.dumps(expected)}. "
            f"Received: {json.dumps(found)}. Without tokenizer.json, vocab.json and merges.txt "
            "are read with CLIP's rules."
        )


def _frame(backend: Tokenizer) -> tuple[int, int]:
    """Return the ids around a text."""
    text = backend.encode("a", add_special_tokens=False).ids
    ids = backend.encode("a").ids
    if len(ids) < 2 or ids[1:-1] != text or ids[-1] != backend.token_to_id(END):
        raise TokenizerError(
            f"The tokenizer's post_processor must put one token before a text and {END!r} after "
            f"it. Received: {text} becomes {ids}."
        )
    return ids[0], ids[-1]


def _tokens(
    added: list[dict], backend: Tokenizer
) -> tuple[dict[str, int], dict[str, int], np.ndarray]:
    """Return the tokens to find in raw texts and in normalized ones, by number, and their ids."""
    raw, normalized = {}, {}
    for number, token in enumerate(added):
        content = token["content"]
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise TokenizerError(
                f"An added token must be found anywhere in a text, and without the white space "
                f"around it. Received: {content!r}, which has single_word, lstrip or rstrip set. "
                "Add it without them."
            )
        if not token["normalized"]:
            raw[content] = number
            continue
        text = backend.normalizer.normalize_str(content)
        if text in normalized or any(characters().classes[ord(c)] == SPACE for c in text):
            raise TokenizerError(
                f"An added token must have no white space, and must differ from the others in "
                f"lower case. Received: {content!r}. Rename it."
            )
        normalized[text] = number
    return raw, normalized, np.array([token["id"] for token in added], "int32")


def _trie(texts: tuple[Mapping[str, int], ...]) -> Trie:
    steps, values = {}, [-1] * len(texts)
    for root, by_text in enumerate(texts):
        for text, value in by_text.items():
            state = root
            for character in map(ord, text):
                if (state, character) not in steps:
                    steps[state, character] = len(values)
                    values.append(-1)
                state = steps[state, character]
            values[state] = value
    states, walked = np.array(list(steps), "int64").T
    next_states = np.array(list(steps.values()), "int32")
    return Trie(states, walked, next_states, np.array(values, "int32"))


def _properties(
    unicode: Characters, texts: tuple[Mapping[str, int], ...], token_count: int
) -> PagedTable:
    lower = unicode.lower
    values = (lower - np.arange(CODE_POINTS) << LOWER_SHIFT) | unicode.classes[lower]
    values |= np.where(unicode.irregular, IRREGULAR, 0)
    for root, by_text in enumerate(texts):
        starts = np.zeros(CODE_POINTS, bool)
        starts[[ord(text[0]) for text in by_text]] = True
        # Raw texts are compared as they are, the others in lower case.
        values |= np.where(starts if root == RAW else starts[lower], STARTS[root], 0)
    behind = np.full(-(-(1 + token_count) // PAGE) * PAGE, TOKEN)
    behind[TEXT_END - CODE_POINTS] = SPACE
    return PagedTable.of(np.concatenate([values, behind]))


def _whole_words(vocab: Mapping[str, int], backend: Tokenizer) -> tuple[list[str], np.ndarray]:
    """Return the words that the merges leave as one token, and their ids."""
    bytes_of = {character: byte for byte, character in byte_alphabet().items()}
    words, ids = [], []
    for token, index in vocab.items():
        letters = token.removesuffix(WORD_END)
        if letters == token or not letters or not all(letter in bytes_of for letter in letters):
            continue
        encoded = backend.model.tokenize(letters)
        if [found.id for found in encoded] != [index]:
            continue
        try:
            words.append(bytes(bytes_of[letter] for letter in letters).decode("utf-8"))
        except UnicodeDecodeError:  # a part of a character is no word
            continue
        ids.append(index)
    return words, np.array(ids, "int32")


def _byte_ids(model: dict) -> np.ndarray:
    vocab, unknown = model["vocab"], model["vocab"].get(model["unk_token"])
    alphabet = [character for _, character in sorted(byte_alphabet().items())]
    pieces = [*alphabet, *(character + WORD_END for character in alphabet)]
    missing = [piece for piece in pieces if piece not in vocab]
    if missing and unknown is None:
        raise TokenizerError(
            f"The tokenizer's vocabulary must have a token for each byte, or an unknown token. "
            f"Missing: {', '.join(missing[:5])}, and the unknown token {model['unk_token']!r}."
        )
    return np.array([vocab.get(piece, unknown) for piece in pieces], "int32")


def _merges(model: dict) -> Merges:
    vocab = model["vocab"]
    pairs = {}  # a pair that is listed twice has its last rank
    for rank, pair in enumerate(model["merges"]):
        pairs[tuple(pair)] = rank
    ordered = sorted(pairs, key=pairs.get)
    left, right, merged = (
        np.array([vocab[name(pair)] for pair in ordered], "int64")
        for name in (lambda pair: pair[0], lambda pair: pair[1], "".join)
    )
    made = {}  # id → the last rank that makes it
    for rank, index in enumerate(merged):
        made[index] = rank
    for rank, pair in enumerate(zip(left, right, strict=True)):
        if any(made.get(index, -1) >= rank for index in pair):
            raise TokenizerError(
                f"A merge must come after all that make its parts, as training leaves them. "
                f"Received: {' '.join(ordered[rank])!r}, which comes before. Such a tokenizer has "
                "to stay outside the graph."
            )
    return Merges(left, right, merged.astype("int32"))
