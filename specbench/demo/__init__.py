"""The small trio (target, EAGLE head, draft model) that shows the main job on any machine.

A config names its members `demo:target`, `demo:eagle` and `demo:draft`; `resolve` turns such a
name into the folder of a checkpoint that vLLM loads.
"""

import difflib
from collections.abc import Callable
from pathlib import Path

from specbench.errors import UserError

PREFIX = "demo:"
WEIGHTS = Path(__file__).parent / "weights"


def resolve(ref: str, *, say: Callable[[str], None] = lambda _: None, build: bool = True) -> str:
    """The model that *ref* names: a member of the trio made ready, anything else as it is.

    Without *build* only the folder is named, whether anything is there or not.

    Raises:
        UserError: there is no such member.
        ToolError: a member could not be fetched or assembled.
    """
    if not ref.startswith(PREFIX):
        return ref
    from specbench.demo import trio

    member = ref.removeprefix(PREFIX)
    makers = {"target": trio.target, "eagle": trio.eagle, "draft": trio.draft}
    folders = {
        "target": trio.target_folder,
        "eagle": lambda: WEIGHTS / "eagle",
        "draft": trio.draft_folder,
    }
    if member not in makers:
        close = difflib.get_close_matches(member, makers, n=1)
        meant = f"did you mean demo:{close[0]}?" if close else f"there are {', '.join(makers)}."
        raise UserError(f"The demo has no {member!r};", hint=meant)
    return str(makers[member](say) if build else folders[member]())


def is_assembled() -> bool:
    """Whether the target lies in the user's cache already."""
    from specbench.demo import trio

    return (trio.target_folder() / "config.json").is_file()
