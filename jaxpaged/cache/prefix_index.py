"""Which block holds the keys and values of which tokens behind which tokens.

    root ── (5, 8) ── (2, 2) ── (9, 1)        one node per full block, keyed by its tokens;
              block 7   block 3 └─ (4, 4)     what is before it is the path from the root
                                              of its `extra`

A node's children are a dictionary keyed by the tokens themselves: the hash only finds the place,
the comparison is of tokens, so that two chains with equal hashes are never taken for each other.
The hash of a block needs not chain with the one before it, as the dictionary it is looked up in
belongs to that one. Knows nothing of reference counts.
"""

from collections.abc import Hashable, Iterator, Sequence

Tokens = tuple[int, ...]


class PrefixNode:
    """A full block of a chain; made and changed by the index only.

    Attributes:
        parent: The node of the block before; None at a root.
        tokens: The block's tokens.
        block_id: Where their keys and values are; None at a root, and once it was forgotten.
        children: Nodes of the blocks that follow.
    """

    __slots__ = ("block_id", "children", "parent", "tokens")

    def __init__(self, parent: "PrefixNode | None", tokens: Tokens, block_id: int | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.children: dict[Tokens, PrefixNode] = {}

    @property
    def is_reachable(self) -> bool:
        """Whether `match` can still find the node: neither it nor one before it was forgotten."""
        return self.block_id is not None or self.parent is None

    def path(self) -> Iterator["PrefixNode"]:
        """The node and those before it, back to the root; the root and forgotten ones left out."""
        node = self
        while node is not None:
            if node.block_id is not None:
                yield node
            node = node.parent


class PrefixIndex:
    """Chains of full blocks by their tokens.

    Invariant: every node in the index can be reached from a root; forgetting a block forgets those
    that only follow it.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[Hashable, PrefixNode] = {}
        self._by_block: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_block)

    def root(self, extra: tuple[Hashable, ...] = ()) -> PrefixNode:
        """Where the chains begin whose keys and values depend on `extra` besides the tokens."""
        root = self._roots.get(extra)
        if root is None:
            root = self._roots[extra] = PrefixNode(None, (), None)
        return root

    def match(
        self, tokens: Sequence[int], extra: tuple[Hashable, ...] = (), *, limit: int | None = None
    ) -> list[PrefixNode]:
        """The longest known chain of full blocks that `tokens` begin with.

        Args:
            tokens: A prompt.
            extra: Everything besides the tokens that changes keys and values.
            limit: Most blocks.
        """
        size = self._block_size
        most = len(tokens) // size
        chain: list[PrefixNode] = []
        node = self.root(extra)
        for index in range(most if limit is None else min(most, limit)):
            node = self.find(node, tuple(tokens[index * size : (index + 1) * size]))
            if node is None:
                break
            chain.append(node)
        return chain

    def find(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """The node of a block with these tokens behind `parent`, if known."""
        return parent.children.get(tokens)

    def insert(self, parent: PrefixNode, tokens: Tokens, block_id: int) -> PrefixNode:
        """The node of a new block behind `parent`."""
        assert len(tokens) == self._block_size, f"a block of {len(tokens)} tokens is not full"
        assert parent.is_reachable, f"block {block_id} would follow a forgotten one"
        assert tokens not in parent.children, f"the chain that ends in block {block_id} is known"
        assert block_id not in self._by_block, f"block {block_id} is in the index already"
        node = PrefixNode(parent, tokens, block_id)
        parent.children[tokens] = self._by_block[block_id] = node
        return node

    def forget(self, block_id: int) -> list[int]:
        """The blocks that are not in the index any more: this one and all that follow it."""
        node = self._by_block[block_id]
        assert node.parent is not None, "roots have no block"
        del node.parent.children[node.tokens]
        forgotten: list[int] = []
        pending = [node]
        while pending:
            node = pending.pop()
            assert node.block_id is not None, "a forgotten node is still in the index"
            forgotten.append(node.block_id)
            del self._by_block[node.block_id]
            node.block_id = None
            pending.extend(node.children.values())
            node.children = {}
        return forgotten
