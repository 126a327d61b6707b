"""Run the chain on a borrowed machine, over SSH.

``bootstrap.py`` is sent as text and runs there on Python alone: it unpacks the tree, and finds what packages are
missing. ``agent.py`` comes with the tree and runs the chain. Here ``tree.py`` says what is sent, ``wheels.py`` what is
installed, and ``session.py`` holds the connection.
"""

from __future__ import annotations

from .agent import RemoteRequest
from .session import Host, HostResult, prove_on
from .tree import Tree, find_tree

__all__ = ["Host", "HostResult", "RemoteRequest", "Tree", "find_tree", "prove_on"]
