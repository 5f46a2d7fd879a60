"""Which full pages of the KV cache hold which tokens, so that sequences that begin alike share them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Node:
    """A full page behind its parent's. tokens: the page's token ids as bytes; features: the target's, of its positions."""

    page: int
    tokens: bytes
    features: Any
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)


class PrefixTree:
    """A tree of pages: a path from the root spells the tokens that its pages hold. A child is found by its tokens themselves,
    compared in full, so that no collision of hashes can hand out keys of other tokens.

    A node in use has its whole path in use, because its user holds that. Pages that nobody uses any more wait in order of
    their last use, a child always before its parent, and are given up from the front.
    """

    def __init__(self) -> None:
        self.root = Node(-1, b"", None, None)
        self._node_of: dict[int, Node] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._node_of)

    def __contains__(self, page: int) -> bool:
        return page in self._node_of

    @property
    def pages(self) -> list[int]:
        return list(self._node_of)

    @property
    def unused(self) -> int:
        return len(self._unused)

    def add(self, parent: Node, page: int, tokens: bytes, features: Any) -> Node | None:
        """The node of a page that somebody uses. None where these tokens have a page already: there is one of each."""
        if tokens in parent.children:
            return None
        node = Node(page, tokens, features, parent)
        parent.children[tokens] = self._node_of[page] = node
        return node

    def set_unused(self, page: int) -> None:
        """The last user of the page is gone. Called for a path's deepest page first."""
        self._unused[page] = None

    def set_used(self, page: int) -> None:
        self._unused.pop(page, None)

    def give_up(self) -> int:
        """Forget the page that went unused longest and return it. Raises KeyError when all are in use."""
        page, _ = self._unused.popitem(last=False)
        node = self._node_of.pop(page)
        assert not node.children and node.parent is not None, "a page was unused for longer than what is behind it"
        del node.parent.children[node.tokens]
        return page
