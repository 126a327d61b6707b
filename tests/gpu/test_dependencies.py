"""What a function depends on is found by its source: all that it uses, and nothing else."""

from __future__ import annotations

import importlib
import sys

import pytest

from flashmoe_science.gpu import dependencies
from flashmoe_science.gpu.dependencies import UntraceableError, trace

FILES = {
    "__init__": "",
    "kernels": """
        '''Two kernels.'''
        import math

        import torch.nn.functional as F

        from . import tools
        from .deep import deepest as lowest
        from .shared import SIZE, Box

        TURNS = SIZE + 1

        def decorate(function):
            return function

        @decorate
        def kernel(x, y: Box):
            '''Add.'''
            from .late import finish

            z = F.relu(x) + TURNS  # a comment
            return finish(middle(z, "a" "b") + tools.used(y))

        def middle(x, name):
            return lowest(x) * math.pi

        def another(x):
            return x

        class Group:
            def first(self):
                return TURNS

            def second(self):
                return another

        class Holder:
            size = 4

            def first(self):
                return self.size + self.help()

            def help(self):
                return TURNS

            def alone(self):
                return 1

            def handed(self):
                return another(self)

            def based(self):
                return super().first()

            @staticmethod
            def plain(x):
                return another(x)

        class Heir(Holder):
            size: int

            def help(self):
                return lowest(super().help())

            def kept(self):
                return super().first()

            def typed(self):
                return self.size

        class Other(Box):
            def wait(self):
                return super().wait()
        """,
    "shared": """
        SIZE = 4
        STRAY = 5

        class Box:
            depth: int

            def wait(self):
                return helper(self.depth)

        def helper(x):
            return x
        """,
    "deep": "def deepest(x):\n    return x + BIAS\n\nBIAS = 1.0\n",
    "tools": "def used(x):\n    return x\n\ndef unused(x):\n    return x\n",
    "late": "def finish(x):\n    return x\n",
    "refusals": "LEAST = 1\n\ndef check(x, *, name):\n    assert x >= LEAST, name\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package, with some texts replaced, and return the dependencies of its kernel."""

    def write(*changes, root="kernels:kernel", more="", stops=()):
        files = {name: text.replace("\n        ", "\n") for name, text in FILES.items()}
        for name, old, new in changes:
            assert old in files[name], old
            files[name] = files[name].replace(old, new)
        folder = tmp_path / "made_up"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text + (more if name == "kernels" else ""))
        importlib.invalidate_caches()
        forget()
        return dict(trace((f"made_up.{root}",), frozenset(f"made_up.{stop}" for stop in stops)))

    def forget():
        trace.cache_clear()
        dependencies._load.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    forget()


def test_all_that_is_used_is_found_and_nothing_else(package):
    found = {key.removeprefix("made_up.") for key in package()}
    own = {key for key in found if not key.endswith(":")}
    assert own == {
        *("kernels:kernel", "kernels:middle", "kernels:TURNS", "kernels:decorate", "kernels:F", "kernels:math"),
        *("kernels:SIZE", "kernels:Box", "kernels:lowest", "shared:SIZE", "shared:Box", "shared:helper"),
        *("deep:deepest", "deep:BIAS", "tools:used", "late:finish"),
    }


@pytest.mark.parametrize(
    "change",
    [
        ("kernels", "  # a comment", ""),
        ("kernels", "'''Add.'''", "'''Add two, and say so at length.'''"),
        ("kernels", "            '''Add.'''\n".replace("    " * 2, "", 1), ""),
        ("kernels", '"a" "b"', '(\n    "ab"\n)'),
        ("kernels", "'''Two kernels.'''", "'''Kernels.'''\n\n\n"),
        ("kernels", "return x\n\nclass Group", "return x + 1\n\nclass Group"),
        ("kernels", "import math\n", "import math\nimport os\n"),
        ("kernels", "import SIZE, Box", "import STRAY, SIZE, Box"),
        ("shared", "STRAY = 5", "STRAY = 6"),
        ("tools", "def unused(x):\n    return x", "def unused(x):\n    return 2 * x"),
    ],
    ids=lambda change: change[1][:20],
)
def test_what_does_not_count_changes_nothing(package, change):
    before = package()
    assert package(change) == before


@pytest.mark.parametrize(
    "change",
    [
        ("kernels", "F.relu(x) +", "F.relu(x) -"),
        ("kernels", "y: Box", "y"),
        ("kernels", "SIZE + 1", "SIZE + 2"),
        ("kernels", "@decorate\n", ""),
        ("kernels", "return function", "return None"),
        ("kernels", "import torch.nn.functional as F", "import torch.nn.init as F"),
        ("kernels", "import deepest as lowest", "import BIAS as lowest"),
        ("kernels", '"a" "b"', '"a" "c"'),
        ("shared", "SIZE = 4", "SIZE = 8"),
        ("shared", "return x\n", "return x + 1\n"),
        ("shared", "depth: int", "depth: float"),
        ("deep", "BIAS = 1.0", "BIAS = 2.0"),
        ("deep", "BIAS = 1.0", "BIAS = 1"),
        ("deep", "BIAS = 1.0", "BIAS = 1.0\nBIAS += 1"),
        ("deep", "BIAS = 1.0", "BIAS = 1.0\nBIAS.imag[0] = 1"),
        ("tools", "def used(x):\n    return x", "def used(x):\n    return 2 * x"),
        ("late", "return x", "return -x"),
    ],
    ids=lambda change: f"{change[0]} {change[2][:20]}",
)
def test_what_counts_changes_something(package, change):
    before = package()
    assert package(change) != before


def in_kernel(statement, imported="from .refusals import check\n"):
    """Return changes that put a statement in front of what the kernel returns."""
    last = 'return finish(middle(z, "a" "b")'
    return ("kernels", last, f"{statement}\n    {last}"), ("kernels", "import math\n", f"import math\n{imported}")


@pytest.mark.parametrize(
    "statement",
    [
        "check(x, name='x')",
        "check(z, name=y.depth)",
        "check({'x': x, 'y': (y, 1)}, name='')",
        "if x:\n        check(x)",
    ],
)
def test_a_statement_that_only_refuses_does_not_count_nor_what_it_calls(package, statement):
    statement = statement.replace("\n", "\n    ")
    imported = "from .refusals import check\n"
    without = package(("kernels", "import math\n", f"import math\n{imported}"))
    if statement.startswith("if"):  # what decides whether it is called stays
        assert package(*in_kernel(statement)) != without
        assert not any("refusals" in key for key in package(*in_kernel(statement)))
        return
    assert package(*in_kernel(statement)) == without == package()
    changed = ("refusals", "LEAST = 1", "LEAST = 2")
    assert package(*in_kernel(statement), changed) == without


@pytest.mark.parametrize(
    ("statement", "imported"),
    [
        ("z = check(x, name='x')", "from .refusals import check\n"),  # its value is used
        ("check(middle(z, ''), name='x')", "from .refusals import check\n"),  # what it is given runs, too
        ("check((z := x), name='x')", "from .refusals import check\n"),
        ("check(x, name='x')", "from .late import finish as check\n"),  # of another module
        ("check(x, name='x')", "from .refusals import check\n\ndef check(x, name):\n    x.add_(1)\n"),
        ("check = middle\ncheck(x, name='x')", "from .refusals import check\n"),  # a name of the function's own
        ("for check in (print,):\n    check(x, name='x')", "from .refusals import check\n"),
        ("refusals.check(x, name='x')", "from . import refusals\n"),
        ("try:\n    check(x, name='x')\nexcept ValueError:\n    z = x", "from .refusals import check\n"),
        ("with F.a:\n    check(x, name='x')", "from .refusals import check\n"),
        (
            "try:\n    z = 1\nexcept ValueError as check:\n    z = 2\ncheck(x, name='x')",
            "from .refusals import check\n",
        ),
        ("match z:\n    case check:\n        z = 1\ncheck(x, name='x')", "from .refusals import check\n"),
        (
            "check(x, name='x')",
            "from .refusals import check\n\ndef bind():\n    global check\n    check = print\n",
        ),
        ("check(x, name='x')", "from torch.refusals import check\n"),
    ],
)
def test_a_statement_that_may_do_more_than_refuse_counts(package, statement, imported):
    changes = in_kernel(statement.replace("\n", "\n    "), imported)
    assert package(*changes) != package(changes[1])


def test_a_module_of_refusals_counts_where_its_values_are_used(package):
    changes = in_kernel("z = check(x, name='x')")
    assert package(*changes) != package(*changes, ("refusals", "LEAST = 1", "LEAST = 2"))


def test_what_a_module_does_when_it_is_imported_counts(package):
    before = package()
    assert package(more="\nmath.pi = 3\n") != before
    assert package(more="\nprint(TURNS)\n") != before
    assert package(more="\nTABLE = {}\nTABLE[1] = 2\n") == before


def test_one_method_of_a_class_is_followed_alone(package):
    first = package(root="kernels:Group.first")
    assert "made_up.kernels:TURNS" in first
    assert "made_up.kernels:another" not in first
    assert "made_up.kernels:another" in package(root="kernels:Group.second")


def test_what_a_method_uses_of_its_own_object_counts(package):
    found = package(root="kernels:Holder.first")
    assert {"made_up.kernels:Holder.size", "made_up.kernels:Holder.help", "made_up.kernels:TURNS"} <= set(found)
    assert "made_up.kernels:Holder.alone" not in found
    assert package(("kernels", "size = 4", "size = 5"), root="kernels:Holder.first") != found
    assert package(("kernels", "return 1", "return 2"), root="kernels:Holder.first") == found


@pytest.mark.parametrize(
    "more",
    [
        "\nHolder.alone = another\n",
        "\nHolder.size = 5\n",
        "\nclass Holder:\n    def alone(self):\n        return 2\n",
    ],
)
def test_a_method_that_is_put_in_the_place_of_another_counts(package, more):
    before = package(root="kernels:Holder.alone")
    assert package(root="kernels:Holder.alone", more=more) != before


def test_a_member_that_is_bound_again_in_the_body_counts(package):
    before = package(root="kernels:Holder.alone")
    again = ("kernels", "    def handed", "    alone = another\n\n    def handed")
    assert package(again, root="kernels:Holder.alone") != before


def test_a_static_method_has_no_object(package):
    assert "made_up.kernels:another" in package(root="kernels:Holder.plain")


def members(found):
    return {key.removeprefix("made_up.kernels:") for key in found if "Holder." in key or "Heir." in key}


@pytest.mark.parametrize("method", ["first", "kept"])
def test_an_inherited_method_is_followed_with_what_its_own_class_puts_in_its_place(package, method):
    found = package(root=f"kernels:Heir.{method}")
    of = " of made_up.kernels:Heir"
    assert members(found) == {
        *(f"Heir.{method}", f"Holder.first{of}", "Heir.size", f"Holder.size{of}", "Heir.help", f"Holder.help{of}"),
    }  # fmt: skip
    assert "made_up.deep:deepest" in found
    for change in (
        ("kernels", "size = 4", "size = 5"),
        ("kernels", "size: int", "size = 6"),
        ("kernels", "return lowest(super", "return another(super"),
        ("kernels", "self.size + self.help()", "self.size - self.help()"),
        ("shared", "SIZE = 4", "SIZE = 8"),
    ):
        assert package(change, root=f"kernels:Heir.{method}") != found, change
    assert package(("kernels", "return 1", "return 2"), root=f"kernels:Heir.{method}") == found


def test_a_base_in_another_module_is_followed_there(package):
    found = package(root="kernels:Other.wait")
    assert {"made_up.shared:Box.wait of made_up.kernels:Other", "made_up.shared:helper"} <= set(found)
    assert found["made_up.shared:Box.depth of made_up.kernels:Other"] != []
    assert package(("shared", "helper(self.depth)", "-helper(self.depth)"), root="kernels:Other.wait") != found
    # a method that its own class does not have, and one that is put in its place
    assert package(root="kernels:Other.depth", stops=("shared",)) == {
        "made_up.kernels:": [], "made_up.kernels:Other.depth": ["depth of made_up.shared:Box"],
    }  # fmt: skip
    put = package(root="kernels:Other.depth", more="\nOther.depth = another\n")
    assert "made_up.kernels:another" in put


def test_a_base_that_is_imported_from_where_it_is_imported_is_followed(package):
    through = [
        ("kernels", "from .shared import SIZE, Box", "from .late import Box\nfrom .shared import SIZE"),
        ("late", "def finish", "from .shared import Box\n\ndef finish"),
    ]
    assert "made_up.shared:Box.wait of made_up.kernels:Other" in package(*through, root="kernels:Other.wait")


@pytest.mark.parametrize(
    ("change", "method", "what"),
    [
        (("kernels", "class Heir(Holder)", "class Heir(Holder, Group)"), "kept", "asks its base"),
        (("kernels", "class Heir(Holder)", "class Heir(Holder, Group)"), "first", r"has no Heir\.first"),
        (("kernels", "class Heir(Holder)", "class Heir(tools.Holder)"), "kept", "asks its base"),
        (("kernels", "class Heir(Holder)", "@decorate\nclass Heir(Holder)"), "first", "another Heir than its body"),
        (("kernels", "class Heir(Holder)", "class Heir(Gone)"), "kept", "asks its base"),
        (("kernels", "return super().first()", "return super"), "kept", "asks its base"),
        (("kernels", "super().first()", "super(Holder, self).first()"), "kept", "asks its base"),
        (("kernels", "super().first()", "super().gone()"), "kept", r"has no Holder\.gone"),
        (("kernels", "super().first()", "super().handed()"), "kept", r"hands on the object of Holder\.handed"),
    ],
)
def test_a_base_that_is_not_known_cannot_be_followed(package, change, method, what):
    with pytest.raises(UntraceableError, match=what):
        package(change, root=f"kernels:Heir.{method}")


@pytest.mark.parametrize(
    ("change", "method", "what"),
    [
        (None, "handed", "hands on the object of Holder.handed"),
        (None, "based", "asks its base"),
        (("kernels", "class Holder", "@decorate\nclass Holder"), "alone", "another Holder than its body says"),
        (("kernels", "class Holder:", "class Holder(metaclass=type):"), "alone", "another Holder than its body says"),
        (("kernels", "self.help()", "self.gone()"), "first", r"has no Holder\.gone"),
    ],
)
def test_a_method_whose_object_is_not_known_cannot_be_followed(package, change, method, what):
    with pytest.raises(UntraceableError, match=what):
        package(*([change] if change else []), root=f"kernels:Holder.{method}")


def test_a_module_that_stops_is_not_followed(package):
    found = package(stops=("shared",))
    assert not any(key.startswith("made_up.shared") for key in found)
    assert found == package(("shared", "SIZE = 4", "SIZE = 8"), stops=("shared",))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("kernels", "import math\n", "import math\nfrom .late import *\n"), "all names"),
        (("kernels", "import math\n", "import pytest as math\n"), "imports pytest"),
        (("kernels", "math.pi", "nowhere"), "uses nowhere"),
        (("kernels", "from .deep import deepest", "from .deep import gone"), r"made_up\.deep has no gone"),
        (("kernels", "import math\n", "import math\nimport made_up.late\nmath.x = made_up\n"), "whole"),
    ],
)
def test_what_cannot_be_followed_is_said_and_not_left_out(package, change, what):
    with pytest.raises(UntraceableError, match=what):
        package(change)


def test_names_that_are_not_there_are_said(package):
    for root in ("kernels:gone", "kernels:Group.gone", "gone:kernel"):
        with pytest.raises(UntraceableError, match="has no"):
            package(root=root)
