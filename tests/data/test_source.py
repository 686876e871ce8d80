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
