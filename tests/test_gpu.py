from __future__ import annotations

from penstock import run_command


def test_a_gpu_without_nvidia_smi_is_found_by_its_driver(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(run_command.shutil, "which", lambda program: None)
    monkeypatch.setattr(run_command, "_DRIVER", tmp_path)
    assert not run_command.nvidia_gpu.__wrapped__()
    (tmp_path / "0000:01:00.0").mkdir()
    assert run_command.nvidia_gpu.__wrapped__()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not run_command.nvidia_gpu.__wrapped__()
