"""What the target is asked to make training data: code of installed packages, templates, itself.

Never HumanEval or MT-Bench: prompts that share ten words in a row with an evaluation text are
dropped.
"""

import ast
import json
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specbench.demo.train import templates
from specbench.errors import UserError

LONGEST_PROMPT = 260  # tokens
ANSWER_LENGTHS = (128, 192, 256)  # tokens
EVALUATION_ANSWER = 192  # tokens
GREEDY_SHARE, WARM = 0.75, 0.7  # of the prompts; the temperature of the rest
SELF_NAMED_TEMPERATURE = 0.8
OVERLAP_WORDS = 10
LONGEST_SOURCE, LONGEST_HEAD = 300_000, 900  # characters
DOCSTRING_LENGTHS = (40, 700)  # characters
FUNCTIONS_PER_FILE = 6
UNBOUND_SHARE = 0.6  # of the methods, shown as functions without self


@dataclass(frozen=True)
class TrainingPrompt:
    """What one sequence starts from."""

    kind: str  # also the kind of the sequence; `chat` in it says that it opens with a system turn
    ids: tuple[int, ...]
    magpie: bool  # the ids end where the user would speak, and the model writes that turn first
    temp: float
    max_new: int


@dataclass(frozen=True)
class Mix:
    """How much of what; the defaults are the recipe's."""

    functions_found: int = 6000  # as many are collected
    first_function: int = 2600  # those with doctests come first, and an earlier head learnt these
    functions_raw: int = 500
    functions_chat: int = 1200
    self_named: int = 250
    topics_per_template: int = 44
    draws_per_number_template: int = 34
    self_asked: int = 3000


@dataclass(frozen=True)
class ChatFormat:
    """What stands around a user's turn in the target's chat template."""

    before: str
    after: str

    def ask(self, text: str) -> str:
        """The whole prompt that asks *text*."""
        return self.before + text + self.after


@dataclass(frozen=True)
class PromptText:
    """A prompt before it is tokenized; a *temp* of None is drawn later."""

    kind: str
    text: str
    magpie: bool = False
    temp: float | None = None


@dataclass(frozen=True)
class EvaluationText:
    """One text that heads are judged on, sent as it is or asked as a chat."""

    kind: str
    text: str
    chat: bool


def write_prompts(path: Path, prompts: Sequence[TrainingPrompt]) -> None:
    """Write *prompts* as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps([asdict(prompt) for prompt in prompts]), encoding="utf-8")
    draft.replace(path)


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """The prompts in *path*; UserError where it holds something else."""
    try:
        return [
            TrainingPrompt(
                kind=str(entry["kind"]),
                ids=tuple(entry["ids"]),
                magpie=bool(entry["magpie"]),
                temp=float(entry["temp"]),
                max_new=int(entry["max_new"]),
            )
            for entry in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise UserError(f"{path} is not a list of training prompts: {problem!r}") from None


def read_evaluation_texts(path: Path) -> list[EvaluationText]:
    """The JSON list of {kind, text, chat} in *path*; UserError where it holds something else."""
    try:
        return [
            EvaluationText(str(entry["kind"]), str(entry["text"]), bool(entry["chat"]))
            for entry in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise UserError(
            f"{path} is not a JSON list of evaluation texts: {problem!r}.",
            hint='Each entry is {"kind": "humaneval", "text": "def …", "chat": false}.',
        ) from None


def word_runs(text: str, length: int = OVERLAP_WORDS) -> set[tuple[str, ...]]:
    """Every run of *length* words in *text*, without case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def without_overlap(
    prompts: Iterable[PromptText], evaluation_texts: Iterable[str]
) -> list[PromptText]:
    """Those of *prompts* that share no ten words in a row with an evaluation text.

    The texts are given as they are, without a chat template, which would overlap with every chat.
    """
    forbidden: set[tuple[str, ...]] = set()
    for text in evaluation_texts:
        forbidden |= word_runs(text)
    return [prompt for prompt in prompts if forbidden.isdisjoint(word_runs(prompt.text))]


def source_roots() -> list[Path]:
    """Where this interpreter and the system keep Python code."""
    system = sorted(Path("/usr/lib").glob("python3*"))
    return [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib")), *system]


def documented_functions(roots: Sequence[Path], rng: random.Random, most: int) -> list[str]:
    """Up to *most* functions of the code in *roots*, cut after their docstring, doctests first."""
    files = sorted({path for root in roots for path in root.rglob("*.py")})
    rng.shuffle(files)
    heads: list[str] = []
    seen: set[str] = set()
    for path in files:
        if len(heads) >= most:
            break
        name = str(path).lower().replace("_", "")
        if "humaneval" not in name and "mtbench" not in name:
            heads += _function_heads(path, rng, seen)
    return sorted(heads, key=lambda head: (">>>" not in head, rng.random()))


def _function_heads(path: Path, rng: random.Random, seen: set[str]) -> list[str]:
    """The heads of a few documented functions of one file, of names not yet *seen*."""
    try:
        source = path.read_text(encoding="utf-8")
        if len(source) > LONGEST_SOURCE:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's escape sequences
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    lines = source.split("\n")
    heads: list[str] = []
    for node in ast.walk(tree):
        if len(heads) == FUNCTIONS_PER_FILE:
            break
        if not isinstance(node, ast.FunctionDef) or node.name in seen or not _is_shown(node):
            continue
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        if len(head) > LONGEST_HEAD:
            continue
        if re.search(r"\(\s*(self|cls)\b", head) and rng.random() < UNBOUND_SHARE:
            head = re.sub(r"\((self|cls)(,\s*)?", "(", head, count=1)
        seen.add(node.name)
        heads.append(rng.choice(templates.PREAMBLES) + head + "\n")
    return heads


def _is_shown(node: ast.FunctionDef) -> bool:
    docstring = ast.get_docstring(node) or ""
    shortest, longest = DOCSTRING_LENGTHS
    return shortest <= len(docstring) <= longest and not node.name.startswith("__")


def questions(mix: Mix, rng: random.Random) -> list[str]:
    """Templated questions about topics, numbers and code."""
    per_topic = min(mix.topics_per_template, len(templates.TOPICS))
    asked = [
        template.format(topic=topic)
        for template in templates.ABOUT_TOPIC
        for topic in rng.sample(templates.TOPICS, per_topic)
    ]
    asked += [
        template.format(
            small=rng.randint(2, 30), middle=rng.randint(2, 60), large=rng.randint(20, 400)
        )
        for template in templates.WITH_NUMBERS
        for _ in range(mix.draws_per_number_template)
    ]
    asked += [
        template.format(task=task)
        for template in templates.ABOUT_CODE
        for task in templates.CODE_TASKS
    ]
    return asked


def self_named_function(rng: random.Random) -> str:
    """The beginning of a function that nobody wrote: the model invents what it does."""
    name = f"{rng.choice(templates.VERBS)}_{rng.choice(templates.NOUNS)}"
    preamble = rng.choice(templates.SELF_NAMED_PREAMBLES)
    return f"{preamble}def {name}{rng.choice(templates.SIGNATURES)}"


def prompt_texts(
    functions: Sequence[str], chat: ChatFormat, mix: Mix, rng: random.Random
) -> Iterator[PromptText]:
    """All prompts of *mix*, in order of kind; *functions* are taken from its first one on."""
    first = mix.first_function % max(1, len(functions))
    wanted = mix.functions_raw + mix.functions_chat
    taken = [*functions[first:], *functions[:first]][:wanted]
    rng.shuffle(taken)
    for head in taken[: mix.functions_raw]:
        yield PromptText("code_raw", head)
    for head in taken[mix.functions_raw :]:
        request = rng.choice(templates.ASK_TO_COMPLETE).format(code=head)
        yield PromptText("code_chat", chat.ask(request))
    for _ in range(mix.self_named):
        yield PromptText("code_self", self_named_function(rng), temp=SELF_NAMED_TEMPERATURE)
    for question in questions(mix, rng):
        yield PromptText("chat_tmpl", chat.ask(question))
    for _ in range(mix.self_asked):
        yield PromptText("chat_magpie", chat.before, magpie=True)


def tokenized(
    texts: Iterable[PromptText], tokenize: Callable[[str], list[int]], rng: random.Random
) -> list[TrainingPrompt]:
    """*texts* in random order as prompts; those that are too long are left out."""
    prompts = []
    for one in texts:
        ids = tokenize(one.text)
        if len(ids) > LONGEST_PROMPT:
            continue
        drawn = 0.0 if rng.random() < GREEDY_SHARE else WARM
        prompts.append(
            TrainingPrompt(
                kind=one.kind,
                ids=tuple(ids),
                magpie=one.magpie,
                temp=drawn if one.temp is None else one.temp,
                max_new=rng.choice(ANSWER_LENGTHS),
            )
        )
    rng.shuffle(prompts)
    return prompts


def build_prompts(
    target: Path, evaluation_texts: Iterable[str], *, mix: Mix | None = None, seed: int = 11
) -> list[TrainingPrompt]:
    """The training prompts for the tokenizer and chat template in *target*."""
    mix, rng = mix or Mix(), random.Random(seed)
    tokenize, chat = _tokenizer(target)
    functions = documented_functions(source_roots(), rng, mix.functions_found)
    texts = without_overlap(prompt_texts(functions, chat, mix, rng), evaluation_texts)
    return tokenized(texts, tokenize, rng)


def evaluation_prompts(target: Path, texts: Iterable[EvaluationText]) -> list[TrainingPrompt]:
    """*texts* as greedy prompts, in their order."""
    tokenize, chat = _tokenizer(target)
    return [
        TrainingPrompt(
            kind=one.kind,
            ids=tuple(tokenize(chat.ask(one.text) if one.chat else one.text)),
            magpie=False,
            temp=0.0,
            max_new=EVALUATION_ANSWER,
        )
        for one in texts
    ]


def _tokenizer(target: Path) -> tuple[Callable[[str], list[int]], ChatFormat]:
    from transformers import AutoTokenizer  # slow to import, and not needed by the rest

    tokenizer = AutoTokenizer.from_pretrained(str(target))
    marker = "(the user's turn)"
    before, after = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    ).split(marker)

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    return tokenize, ChatFormat(before, after)
