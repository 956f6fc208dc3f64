# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os.path
from pathlib import Path

import numpy
import pytest
import torch

from lightning_replay.samplers.tables import CORRECTIONS
from lightning_replay.saving.spec import PUBLIC, NotRebuildableError, build, describe, rebuildable
from tests.saves import recorded_classes


@rebuildable
class Wheel:
    def __init__(self, spokes: int = 8, *, rim: object = None) -> None:
        self.spokes = spokes
        self.rim = rim


class Tyre(Wheel):
    pass


@rebuildable
class Bicycle:
    def __init__(self, front: Wheel, back: Wheel, bell=os.path.join, options: dict | None = None) -> None:
        self.front, self.back, self.bell, self.options = front, back, bell, options


def test_arguments_are_remembered_defaults_and_those_without_a_name_included() -> None:
    assert Wheel(rim="thin").init_arguments == {"spokes": 8, "rim": "thin"}
    lamp = Lamp(3.0, colour="red", rim=Wheel(4))
    assert lamp.init_arguments == {"watts": 3.0, "colour": "red", "rim": lamp.more["rim"]}
    again = build(json.loads(json.dumps(describe(lamp))), trust=["tests"])
    assert (again.watts, again.more["colour"], again.more["rim"].spokes) == (3.0, "red", 4)


@rebuildable
class Bell:
    """Has nothing to choose, and no constructor."""


@rebuildable
class Lamp:
    """Takes options that it does not name."""

    def __init__(self, watts: float, **more: object) -> None:
        self.watts, self.more = watts, more


def test_a_class_without_a_constructor_is_built_again_and_one_of_arguments_without_names_not_recorded() -> None:
    assert Bell().init_arguments == {}
    assert type(build(json.loads(json.dumps(describe(Bell()))), trust=["tests"])) is Bell
    for wrong in (lambda: Bell(3), lambda: Bell(loud=True)):
        with pytest.raises(TypeError):
            wrong()

    class Chain:
        def __init__(self, *links: int) -> None:
            self.links = links

    with pytest.raises(TypeError, match=r"Chain takes \*arguments; a rebuildable class names them"):
        rebuildable(Chain)


def test_a_tree_of_objects_is_built_again_from_json() -> None:
    options = {"pair": (1, 2), "device": torch.device("cpu"), "path": Path("x"), "list": [None, True]}
    bicycle = Bicycle(Wheel(3), Tyre(rim=os.path.basename), options=options)
    again = build(json.loads(json.dumps(describe(bicycle))), trust=["tests", "posixpath"])
    assert (again.front.spokes, type(again.back), again.back.rim) == (3, Tyre, os.path.basename)
    assert again.options == {**options, "path": "x"}
    assert again.bell is os.path.join
    described = describe([numpy.int64(3), numpy.float32(0.5)])
    assert build(json.loads(json.dumps(described))) == [3, 0.5]


@pytest.mark.parametrize("option", [lambda x: x, object(), torch.zeros(2)])
def test_what_has_no_import_path_is_saved_but_not_built(option) -> None:
    description = json.loads(json.dumps(describe(Wheel(rim=option))))
    with pytest.raises(NotRebuildableError, match=r"replay\.rim .*replay\.load\(path\)"):
        build(description, trust=["tests"])


def test_only_recorded_classes_and_what_this_library_defines_are_found() -> None:
    for path in ("subprocess:Popen", "os:system", "lightning_replay.free_memory:tempfile.mkdtemp"):
        for kind in ("class", "import"):
            with pytest.raises(NotRebuildableError):
                build({kind: path, "arguments": {}}, trust=["subprocess"] if kind == "class" else [])
    with pytest.raises(NotRebuildableError, match="no_such_module:thing"):
        build({"import": "no_such_module:thing"}, trust=["no_such_module"])
    for path in ("lightning_replay.samplers:annotations", "lightning_replay:Any", "lightning_replay.nothing:Nothing"):
        with pytest.raises(NotRebuildableError, match="cannot be imported here"):
            build({"import": path}, trust=["lightning_replay"])


class Unicycle(Wheel):
    """Has a constructor of its own, whose arguments nobody recorded."""

    def __init__(self, colour: str) -> None:
        super().__init__(12)
        self.colour = colour


def test_a_subclass_with_a_constructor_of_its_own_is_not_built_with_its_parents_arguments() -> None:
    with pytest.raises(NotRebuildableError, match="Unicycle"):
        build(describe(Unicycle("red")), trust=["tests"])


def test_a_save_names_classes_by_public_modules_wherever_their_files_are() -> None:
    classes = recorded_classes()
    assert len(classes) > 50
    for value in [*classes, *filter(None, CORRECTIONS.values())]:
        path = describe(value)["import"]
        assert path.partition(":")[0] in PUBLIC, path
        for saved in (path, f"lightning_replay.a_file_that_moved:{value.__name__}"):
            assert build({"import": saved}, trust=["lightning_replay"]) is value
