"""Whether a run may serve as a baseline, and why not.

- Trusted means: it passed, nothing of it was unreadable, its tree was clean, its branch is a trusted one, and, where a repository is
  at hand, the commit lies on the branch of that name there, here or at origin.
- What is not known is not trusted: a repository at hand that lacks the commit or the branch, or that git cannot read, vouches for
  nothing. Only where no repository is at hand is a file believed that names a trusted branch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.regress.history.importers.draft import Draft, Tree

NOT_PASSED = "it did not pass"


def why_untrusted(draft: Draft, trusted: Sequence[str]) -> str:
    """The reason, or empty for a run that is trusted."""
    if draft.passed is None:
        return "no outcome is known"
    if not draft.passed:
        return f"{NOT_PASSED}: {draft.flaws[0]}" if draft.flaws else NOT_PASSED
    if draft.flaws:
        return f"not all of it could be read: {draft.flaws[0]}"
    if not draft.trees:
        return "no commit is known"
    return next((reason for tree in draft.trees if (reason := _tree(tree, trusted))), "")


def _tree(tree: Tree, trusted: Sequence[str]) -> str:
    if tree.commit is None:
        return "no commit is known"
    if tree.dirty is None:
        return "it is not known whether the tree was clean"
    if tree.dirty:
        return "the tree was not clean"
    if tree.branch is None:
        return "no branch is known"
    if not any(fnmatch.fnmatchcase(tree.branch, pattern) for pattern in trusted):
        return f"the branch {tree.branch} is not one of {', '.join(trusted) or '(none)'}"
    return _on_branch(tree.path, tree.commit, tree.branch) if tree.path else ""


def _on_branch(folder: Path, commit: str, branch: str) -> str:
    """Why the repository at hand does not vouch for the commit; empty when it does, or where there is no repository."""
    from seatrial.evidence.git import commit_of, is_ancestor, top_level

    folder = folder.absolute()
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return ""
    try:
        root = top_level(folder)
        known = commit_of(root, commit)
        tips = [tip for name in (f"refs/heads/{branch}", f"refs/remotes/origin/{branch}") if (tip := commit_of(root, name))]
        if known is None:
            return f"the commit {commit[:12]} is not known in {root}, where the file lies"
        if not tips:
            return f"there is no branch {branch} in {root} that could hold the commit {commit[:12]}"
        if any(is_ancestor(root, known, tip) for tip in tips):
            return ""
    except UserError as error:
        return f"git cannot tell whether the commit {commit[:12]} is on {branch}: {error.message}"
    return f"the commit {commit[:12]} is not on the branch {branch} of {root}"
