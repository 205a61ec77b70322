"""The recorded fingerprints and the generated page belong to the patches of this commit."""

from tests.contract.toys import run_ranks


def test_the_recorded_fingerprints_are_those_of_the_installed_megatron(tmp_path):
    ranks = run_ranks("k3_plugins.patching.record", ["--check"], tmp_path)
    assert ranks.codes == [0] and "up to date" in ranks.logs[0], ranks


def test_the_page_about_the_patches_is_up_to_date(tmp_path):
    ranks = run_ranks("k3_plugins.patching.docs", ["--check"], tmp_path)
    assert ranks.codes == [0] and "up to date" in ranks.logs[0], ranks
