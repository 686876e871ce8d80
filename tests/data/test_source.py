"""`as_source` accepts the forms in which users have their data."""

from collections import UserDict

import numpy as np
import pytest
from tests.extras import require

import penstock as ps
from penstock.data import as_source


def test_a_torch_dataset_with_a_read_of_its_own_is_read_by_getitem():
    class ReadsFiles(require("torch").utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return self.read(i)

        def read(self, path):
            return {"x": np.float32(path)}

    assert ps.Loader(ReadsFiles(), 2)[1]["x"].tolist() == [2, 3]


def test_an_npz_file_and_any_mapping_are_dicts_of_arrays(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.arange(6), y=np.ones((6, 2)))
    with np.load(tmp_path / "x.npz") as file:
        loader = ps.Loader(file, 3)
    assert loader[1]["x"].tolist() == [3, 4, 5]
    assert ps.Loader(UserDict(x=np.arange(6)), 3)[1]["x"].tolist() == [3, 4, 5]


def test_columns_of_the_same_name_are_refused():
    pandas = require("pandas")
    with pytest.raises(ValueError, match="several columns 'a'"):
        as_source(pandas.DataFrame([[1, 2, 3]], columns=["a", "b", "a"]))


def test_keys_of_different_types_are_told():
    with pytest.raises(TypeError, match="make them all strings"):
        as_source({"a": np.zeros(2), 1: np.zeros(2)})
    with pytest.raises(TypeError, match="make them all strings"):
        ps.Loader([{"a": 1, 1: 2}], 1)[0]


def test_a_list_of_arrays_too_short_for_the_batch_points_to_a_tuple():
    with pytest.raises(ValueError, match=r"2 records.*a tuple or dict"):
        ps.Loader([np.zeros((100, 3)), np.zeros(100)], 10)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("x.JPG", r"ps\.images\(folder, size=224\)"),
        ("x.jsonl", r"ps\.stream\(ps\.jsonl\(paths\), \.\.\.\)"),
        ("x.tar.gz", r"ps\.webdataset"),
        ("x.csv", r"pandas\.read_csv"),
        ("x.unknown", r"known endings are \.parquet"),
    ],
)
def test_a_file_that_a_loader_does_not_read_names_what_does(tmp_path, name, remedy):
    (tmp_path / name).touch()
    with pytest.raises(TypeError, match=rf"{name}' .*{remedy}"):
        ps.Loader(str(tmp_path / name), 2)


@pytest.mark.parametrize("data", ["nofolder", ["to be", "or not"], "no.jpg"])
def test_a_path_that_does_not_exist_is_named(data):
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: '(nofolder|to be|no.jpg)' \(relative to .*Check"):
        ps.Loader(data, 2)


def lengths(record):
    return {"n": np.int32(len(record["text"])), "y": np.int32(record["y"])}


def test_a_pandas_frame_with_texts_is_read_by_functions():
    pandas = require("pandas")
    columns = {"text": ["a", "bc", "def"], "kind": pandas.Categorical(["u", "v", "u"]), "y": [1, 2, 3]}
    made = pandas.DataFrame(columns)
    for frame in (made, pandas.DataFrame(columns, index=[7, 8, 9]), made.astype("object")):
        assert ps.Loader(frame, 3, transform=ps.per_record(lengths))[0]["n"].tolist() == [1, 2, 3]
        assert ps.Loader(frame, 3, transform=lambda batch: {"y": batch["y"].astype(int)})[0]["y"].tolist() == [1, 2, 3]
    texts = ps.Loader(made["text"], 3, transform=ps.per_record(lambda text: {"n": np.int32(len(text))}))
    assert texts[0]["n"].tolist() == [1, 2, 3]
    assert ps.Loader(pandas.Series([4, 5], index=[9, 7]), 2)[0].tolist() == [4, 5]


def test_the_advice_for_a_table_of_text_works(tmp_path):
    pandas = require("pandas")
    (tmp_path / "x.csv").write_text("text,y\ngood film,1\nbad,0\n")
    with pytest.raises(TypeError, match=r"pandas\.read_csv\(path\)"):
        ps.Loader(tmp_path / "x.csv", 2)
    assert ps.Loader(pandas.read_csv(tmp_path / "x.csv"), 2, transform=ps.per_record(lengths))[0]["n"].tolist() == [9, 3]


def test_a_list_of_texts_is_told_from_a_list_of_paths():
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: 'good film'.*\{'text': text\}"):
        ps.Loader(["good film", "bad"], 2)


def test_tables_with_arrows_stream_are_read_by_column():
    polars = require("polars")
    frame = polars.DataFrame(
        {
            "user": [2**53 + 1, 7, 8],
            "score": [0.5, 1.0, 2.0],
            "text": ["a", "bc", "def"],
            "kind": polars.Series(["u", "v", "u"], dtype=polars.Categorical),
            "tokens": [[1], [2, 3], [4, 5, 6]],
            "pair": polars.Series([[1, 2], [3, 4], [5, 6]], dtype=polars.Array(polars.Int16, 2)),
            "words": [["a"], ["b", "c"], []],
            "more": [{"t": "x"}] * 3,
        }
    )
    batch = ps.Loader(frame.select("user", "score", "pair"), 3)[0]
    assert {name: (leaf.dtype.name, leaf.tolist()) for name, leaf in batch.items()} == {
        "user": ("int64", [2**53 + 1, 7, 8]),
        "score": ("float64", [0.5, 1.0, 2.0]),
        "pair": ("int16", [[1, 2], [3, 4], [5, 6]]),
    }
    assert ps.Loader(frame.select("tokens"), 3, collate=ps.pad_to([3]))[0]["tokens"].tolist() == [[1, 0, 0], [2, 3, 0], [4, 5, 6]]
    seen = []
    ps.Loader(frame, 3, transform=ps.per_record(lambda record: seen.append(record) or {"x": 1}))[0]
    assert [record["text"] + record["kind"] for record in seen] == ["au", "bcv", "defu"]
    assert [(record["words"], record["more"]) for record in seen][1] == (["b", "c"], {"t": "x"})
    assert ps.Loader(frame["user"], 2)[0].tolist() == [2**53 + 1, 7]
    assert ps.Loader(ps.pack(frame.select("tokens"), 6), 1)[0]["tokens"].tolist() == [[1, 2, 3, 4, 5, 6]]


def test_other_objects_of_polars_are_refused_with_a_remedy():
    polars = require("polars")
    frame = polars.DataFrame({"x": [1, None, 3]})
    with pytest.raises(TypeError, match=r"LazyFrame of polars.*\.collect\(\)"):
        ps.Loader(frame.lazy(), 2)
    with pytest.raises(ValueError, match=r"column 'x' has 1 nulls.*fill_null"):
        ps.Loader(frame, 2)
    for table in (frame, frame.to_arrow(), frame.to_pandas()):
        with pytest.raises(TypeError, match=r"stream needs an iterable of records, got (DataFrame|Table): .*ps\.Loader"):
            ps.stream(table, 2)
