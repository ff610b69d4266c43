"""`amp-compiler rules import` of whole files of other systems."""


def test_a_net_and_a_configuration_become_rule_files_that_are_good(shell, tmp_path):
    net, config = tmp_path / "net.prototxt", tmp_path / "ds_config.json"
    net.write_text("default_forward_type: FLOAT16\nreduce_buckets: 2\nglobal_grad_scale_adaptive: true\n")
    config.write_text('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}')
    for source, note in ((net, "formula: l2"), (config, 'dtype="fp16", clip_norm=1.0')):
        out = source.with_suffix(".yaml")
        code, _, message = shell("rules", "import", source, "--output", out)
        assert code == 0 and note in message
        code, said, _ = shell("rules", "check", out)
        assert code == 0 and "good" in said
        assert shell("rules", "import", source)[1] == out.read_text(encoding="utf-8")


def test_what_is_wrong_is_told_with_its_line(shell, tmp_path):
    net = tmp_path / "net.prototxt"
    net.write_text("default_forward_type: FLOAT16\ndefault_forward_math: FLOAT16\n")
    code, said, message = shell("rules", "import", net)
    assert code == 1 and not said and "net.prototxt:2:" in message and "hint:" in message


def test_a_list_of_nodes_extends_a_preset_and_stays_as_it_is(shell, tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "rules.yaml"
    path.write_text("head:float32\n", encoding="utf-8")
    assert shell("rules", "import", path, "--extends", "fast", "--output", out)[0] == 0
    assert shell("rules", "check", out)[0] == 0 and "extends: fast" in out.read_text(encoding="utf-8")
    assert shell("rules", "import", path, "--output", path)[0] == 2
    assert "'head:float32' in a.txt" in shell("rules", "import", path)[1]
    assert shell("rules", "import", tmp_path / "none")[0] == 1
