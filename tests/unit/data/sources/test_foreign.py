"""Data that no source reads are known by their names and by how they begin, and the error says what to do."""

import os

import pytest

from sightline.data.sources.foreign import said

DICOM = b"\0" * 128 + b"DICM"
VIA = b'#filename,file_size, "region_shape_attributes" ,Region_Attributes,x\na,1'


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("IM0001", DICOM, "DICOM ({}), which is not read; convert each series to NIfTI, e.g. with dcm2niix"),
        ("a.DCM", b"", "DICOM ({})"),
        ("a", DICOM[1:], ""),
        ("a.csv", VIA, "VIA's csv ({}), which is not read; in VIA choose Annotation, Export Annotations (as json)"),
        ("a.txt", VIA, ""),
        ("a.csv", b"filename,region_attributes\n,region_shape_attributes", ""),
        ("a.csv", b"# CSV_HEADER = metadata_id,file_list", "the csv of VIA 3 ({}), which is not read; in VIA 3 choose"),
        ("a.txt", b"# CSV_HEADER = metadata_id,file_list", ""),
        *[
            (name, b'{"projects" : {}, "data_row": {}}', "an export of Labelbox ({}), which is not read")
            for name in ("a.json", "a.ndjson", "a.jsonl")
        ],
        ("a.json", b'{"data_row": 1, "project": {}}', ""),
        ("a.txt", b'{"projects": {}, "data_row": {}}', ""),
        ("a.json", b'[{"classTitle": 1, "geometryType": 2}]', "an export of Supervisely ({})"),
        ("a.json", b'{"item": 1, "annotations": [{"slots": 1}]}', "an export of V7 Darwin ({})"),
        ("a.json", b'{"item": 1, "annotations": []}', ""),
        ("a.json", b'[{"image": 1, "annotations": [{"coordinates": 1}]}]', "an export of Create ML ({})"),
        ("a.json", b'{"_via_x": 0, "image": 1, "annotations": 1, "coordinates": 1}', ""),
        ("a.txt", b'[{"image": 1, "annotations": [{"coordinates": 1}]}]', ""),
        ("a.h5", b"\x89HDF", "an HDF5 file ({}), which is not read; write its images into class folders"),
        ("a.hdf5", b"\x89HDF", "an HDF5 file ({})"),
        ("a.h5", b"HDF", ""),
        ("a.bin", b"\x89HDF", ""),
        ("data.mdb", b"", "an LMDB ({}), which is not read; write its images into a .tar"),
        ("data.LMDB", b"", "an LMDB ({})"),
        ("data", b"\0" * 16 + b"\xde\xc0\xef\xbe", "an LMDB ({})"),
        ("data", b"\0" * 15 + b"\xde\xc0\xef\xbe", ""),
        *[(f"a{end}", b"", "an archive ({}), which is not read in place; unpack it and give the folder")
          for end in (".tar.gz", ".tgz", ".ZIP", ".7z", ".rar")],
        ("a.tar", b"", ""),
        (".a.zip", b"", ""),
        ("dataset_description.json", b'{"BIDSVersion": 1}', "a BIDS dataset ({}), which is not read; put its"),
        ("dataset_description.json", b"{}", ""),
        ("description.json", b'{"BIDSVersion": 1}', ""),
    ],
)  # fmt: skip
def test_data_of_others_are_known(tmp_path, name, data, expected):
    file = tmp_path / "below" / name
    file.parent.mkdir()
    file.write_bytes(data)
    for place in (tmp_path, file.parent) if name[0] == "." else (tmp_path, file.parent, file):
        found = said(place)
        assert found.startswith(expected.format(file)) and bool(found) == bool(expected)


def test_some_entries_of_a_folder_are_looked_at(tmp_path):
    for number in range(50):
        (tmp_path / f"{number:02d}").touch()
    (tmp_path / "50.zip").touch()
    assert said(tmp_path) == "" and said(tmp_path / "50.zip") and said(tmp_path / "49") == ""
    os.remove(tmp_path / "00")
    assert said(tmp_path).startswith("an archive")
    assert said(tmp_path / "none" / "more") == ""
    for number in range(51):
        (tmp_path / "two" / f"{number:02d}").mkdir(parents=True)
    (tmp_path / "two" / "50" / "a.zip").touch()
    assert said(tmp_path / "two") == ""
    os.rmdir(tmp_path / "two" / "00")
    assert said(tmp_path / "two").startswith("an archive")
