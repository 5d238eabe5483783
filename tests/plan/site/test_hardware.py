"""The GPUs that are known, how they are called, and what a user's file changes."""

import re
import tomllib
from pathlib import Path

import pytest
from huggingface_hub import JobHardware

from flexor.core.errors import ConfigError
from flexor.plan.site.hardware import DTYPES, GPU, Flavor, Hardware, load_hardware


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware()


@pytest.fixture(autouse=True)
def no_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXOR_GPUS", raising=False)


def written(folder: Path, text: str) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    return file


# The file as it is.


def test_there_are_many_from_small_to_large(hardware: Hardware) -> None:
    assert len(hardware.gpus) >= 30
    for name in ("RTX 3060", "Jetson AGX Orin 64GB", "H200", "B200", "Apple M4 Max 128GB"):
        assert hardware.find(name).name == name


def test_figures_are_of_one_size(hardware: Hardware) -> None:
    """A slip of a digit or a sparse rate among dense ones shows as an odd ratio."""
    for gpu in hardware.gpus.values():
        intensity = gpu.flops("fp32") / gpu.bandwidth
        assert 5 < intensity < 150, (gpu.name, intensity)
        assert gpu.flops("fp32") <= gpu.flops("tf32") * 1.001, gpu.name
        if gpu.maker == "nvidia":
            tensor = gpu.flops("fp16") / gpu.flops("fp32")
            assert 1.9 < tensor < 33, (gpu.name, tensor)
            assert gpu.sms and gpu.compute_capability, gpu.name
        if "bf16" in gpu.tflops:
            assert gpu.flops("bf16") == gpu.flops("fp16"), gpu.name
        if "tf32" in gpu.tflops and "bf16" in gpu.tflops:
            assert gpu.flops("bf16") / gpu.flops("tf32") == pytest.approx(2, rel=0.02), gpu.name
        if "fp8" in gpu.tflops:
            assert gpu.flops("fp8") / gpu.flops("bf16") == pytest.approx(2, rel=0.02), gpu.name


def test_memory_is_what_is_usable(hardware: Hardware) -> None:
    """Never more than the name says, which is where tables usually are wrong."""
    for gpu in hardware.gpus.values():
        size = re.search(r"(\d+)GB", gpu.name)
        if size:
            assert 0.6 * int(size[1]) < gpu.memory_gib < int(size[1]), gpu.name
    assert hardware.find("L4").memory == pytest.approx(23_583_784_960, rel=1e-4)  # deviceQuery's
    assert hardware.find("A100 40GB").memory == pytest.approx(42_298_834_944, rel=1e-4)


def test_every_figure_has_a_source_and_every_price_a_date(hardware: Hardware) -> None:
    names = {*DTYPES, "all", "memory_gib", "bandwidth_gb_s", "tdp_w", "sms", "l2_mib", "nvlink_gb_s"}
    for gpu in hardware.gpus.values():
        assert gpu.source and re.fullmatch(r"\d{4}-\d\d-\d\d", gpu.checked), gpu.name
        assert set(gpu.unchecked) <= names, gpu.name
    for price in (*hardware.purchases.values(), *hardware.flavors, hardware.prices):
        assert price.source and re.fullmatch(r"\d{4}-\d\d(-\d\d)?", price.as_of), price
    h200 = hardware.find("H200")
    assert h200.is_checked("bf16") and not h200.is_checked("l2_mib")
    assert not hardware.find("RTX 3080").is_checked("bf16")


def test_flavors_of_hf_jobs_have_the_names_that_its_client_knows(hardware: Hardware) -> None:
    listed = {flavor.name for flavor in hardware.flavors if flavor.cloud == "hf-jobs"}
    client_flavors = {flavor.value for flavor in JobHardware if not flavor.value.startswith("cpu")}
    assert len(listed) >= 22 and listed <= client_flavors  # a newer client may know more


def test_names_and_aliases_collide_only_where_memory_tells_them_apart(hardware: Hardware) -> None:
    for gpu in hardware.gpus.values():
        for alias in gpu.aliases:
            if alias != "Orin":
                assert hardware.find(alias) is gpu, alias


# Units.


def test_units() -> None:
    gpu = GPU("x", 2, 900, {"fp32": 10, "fp16": 80}, 100, capability="12.1", nvlink_gb_s=600, pcie=4)
    assert gpu.memory == 2 * 2**30
    assert gpu.bandwidth == 900e9
    assert gpu.compute_capability == (12, 1)
    assert gpu.flops("fp16") == 80e12
    assert gpu.flops("tf32") == gpu.flops("bf16") == 10e12  # no unit for them
    assert gpu.peer_link == 300e9  # a direction of the two
    assert gpu.host_link == pytest.approx(31.5e9, rel=0.01)
    with pytest.raises(ConfigError, match="fp8"):
        gpu.flops("fp8")


def test_links_without_nvlink_and_without_pcie() -> None:
    assert GPU("x", 1, 100, {"fp32": 1}, 1, pcie=3, pcie_lanes=8).peer_link == pytest.approx(7.88e9)
    assert GPU("x", 1, 100, {"fp32": 1}, 1, unified=True).host_link == 100e9


# Names.


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA Thor", "Jetson Thor"),
        ("Apple M4 Max", "Apple M4 Max 128GB"),
    ],
)
def test_what_torch_calls_them(hardware: Hardware, device: str, name: str) -> None:
    gpu = hardware.recognise(device)
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize(
    "device",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA L40", "NVIDIA H20", ""],
)
def test_relatives_are_not_mistaken_for_it(hardware: Hardware, device: str) -> None:
    assert hardware.recognise(device) is None


def test_memory_tells_variants_apart(hardware: Hardware) -> None:
    assert hardware.recognise("Orin") is None
    for gib, name in [
        (6.1, "Jetson Orin Nano 8GB"),
        (29, "Jetson AGX Orin 32GB"),
        (60, "Jetson AGX Orin 64GB"),
    ]:
        gpu = hardware.recognise("Orin", round(gib * 2**30))
        assert gpu is not None and gpu.name == name


def test_other_memory_than_expected_is_believed(hardware: Hardware) -> None:
    modified = hardware.recognise("NVIDIA GeForce RTX 4090", 48 * 2**30)
    assert modified is not None and modified.memory == 48 * 2**30 and modified.sms == 128
    usual = hardware.find("RTX 4090")
    assert hardware.recognise("NVIDIA GeForce RTX 4090", usual.memory - 2**20) is usual


def test_people_type_as_they_like(hardware: Hardware) -> None:
    for name in ("rtx4090", "RTX-4090", "4090", "geforce rtx 4090", "GeForce 4090"):
        assert hardware.find(name).name == "RTX 4090"


def test_errors_name_what_is_near(hardware: Hardware) -> None:
    with pytest.raises(ConfigError, match=r"Unknown GPU 'rtx 4091'. Did you mean RTX 4090.*--gpus-file"):
        hardware.find("rtx 4091")
    with pytest.raises(ConfigError, match="Available: RTX 3060, "):
        hardware.find("voodoo")
    with pytest.raises(
        ConfigError, match=r"'orin' is ambiguous: it may be Jetson Orin Nano 8GB or .*Use one of these names"
    ):
        hardware.find("orin")


def flavor_of(hardware: Hardware, name: str) -> Flavor:
    (flavor,) = (flavor for flavor in hardware.flavors if flavor.name == name)
    return flavor


def test_offers_begin_with_the_cheapest(hardware: Hardware) -> None:
    offers = hardware.offers(hardware.find("H100"), gpus=8)
    assert [o.usd_per_hour for o in offers] == sorted(o.usd_per_hour for o in offers)
    assert len({o.cloud for o in offers}) > 1
    flavor = flavor_of(hardware, "h200x8")
    assert (flavor.gpu, flavor.gpus, flavor.usd_per_hour) == ("H200", 8, 40.0)


# A user's file.

MINE = """
[gpus."My GPU"]
memory_gib = 20
bandwidth_gb_s = 500
tflops = { fp32 = 10, bf16 = 40 }
tdp_w = 200

[prices]
kwh = 0.1
buy."My GPU" = { usd = 100 }

[clouds.lab.flavors]
mine = { gpu = "My GPU", gpus = 2, usd_per_hour = 0.5, cores = 8, ram_gb = 64 }
"""


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_gpu_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    file = written(tmp_path, MINE)
    if by == "environment":
        monkeypatch.setenv("FLEXOR_GPUS", str(file))
    hardware = load_hardware(file if by == "flag" else None)
    gpu = hardware.find("my gpu")
    assert gpu.memory == 20 * 2**30 and gpu.source == str(file) and not gpu.is_checked("bf16")
    assert hardware.purchases["My GPU"].usd == 100
    assert hardware.offers(gpu, 2)[0].cloud == "lab"
    assert hardware.prices.kwh == 0.1 and hardware.prices.years > 0
    assert hardware.find("H200").memory_gib == 139.8  # all others are still there


def test_corrections_keep_what_they_do_not_name(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "[gpus.4090]\nmemory_gib = 47.5\ntflops = { bf16 = 150 }\n[clouds.hf-jobs.flavors.l4x1]\nusd_per_hour = 9\n",
    )
    before, after = load_hardware(), load_hardware(file)
    gpu, usual = after.find("RTX 4090"), before.find("RTX 4090")
    assert gpu.memory_gib == 47.5
    assert gpu.tflops == {**usual.tflops, "bf16": 150}
    assert gpu.bandwidth_gb_s == usual.bandwidth_gb_s
    assert gpu.source.startswith(usual.source) and gpu.source.endswith(f"memory_gib, tflops: {file}")
    assert (
        flavor_of(after, "l4x1").usd_per_hour == 9
        and flavor_of(after, "l4x1").cores == flavor_of(before, "l4x1").cores
    )
    assert len(after.gpus) == len(before.gpus)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[gpu."x"]', "unknown table 'gpu'. Did you mean gpus"),
        ('[gpus."x"]\nmemory_gib = 1', "gpus.x requires bandwidth_gb_s, tflops, tdp_w"),
        ("[gpus.4090]\nmemory = 3", "Unknown setting gpus.RTX 4090.memory=3. Did you mean .*memory_gib"),
        ('[gpus.4090]\nmemory_gib = "much"', "memory_gib='much' is not valid: expected number"),
        ("[gpus.4090]\nmemory_gib = 0", "memory_gib=0 must be greater than 0"),
        ("[gpus.4090]\ntflops = { fp64 = 3 }", "tflops.fp64 is unknown. The types are: fp32, "),
        ("[gpus.4090]\npcie = 9", "pcie=9 must be a PCIe generation: 3, 4, 5, 6"),
        ('[gpus.4090]\ncapability = "89"', 'must be like "8.9"'),
        (
            '[prices.buy]\n"RTX 409" = { usd = 1 }',
            "price for the unknown GPU 'RTX 409'. Did you mean RTX 4090",
        ),
        ("gpus = 3", "gpus=3 must be a table"),
        ("[gpus", "is not valid TOML"),
    ],
)
def test_mistakes_in_it_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hardware(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Can't read the GPU file .*nowhere.toml: No such file"):
        load_hardware(tmp_path / "nowhere.toml")


def test_the_file_is_valid_as_its_own_correction(tmp_path: Path) -> None:
    """What we ship has the form that a user's file has."""
    import flexor.plan.site

    shipped = Path(flexor.plan.site.__file__).with_name("gpus.toml")
    assert tomllib.loads(shipped.read_text())["gpus"].keys() == load_hardware(shipped).gpus.keys()
