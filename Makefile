# setup -> build -> demo, demo-images; setup -> test; setup -> check. Each does what it needs of the earlier ones.
# The only thing cargo cannot fetch is libtorch: it comes as a Python wheel and goes into .libtorch/.

TORCH := torch==2.11.0
# What libtorch_cpu needs of CUDA even without a GPU.
TORCH_CPU := --no-deps $(TORCH) nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
DEMO := runs/demo
DEMO_IMAGES := runs/demo-images
BLOCKSTREAMER := target/release/blockstreamer

.PHONY: setup build demo demo-images test check clean-demo

setup:
	@set=cpu; packages="$(TORCH_CPU)"; \
	if [ -e /proc/driver/nvidia/version ] || ldconfig -p 2>/dev/null | grep -q 'libcuda\.so'; then \
		set=cuda; packages="$(TORCH)"; \
	fi; \
	if [ -e .libtorch/.complete-$$set ] || [ -e .libtorch/.complete-cuda ]; then exit 0; fi; \
	echo "installing libtorch ($$set set of wheels) into .libtorch/"; \
	python3 -m pip --version >/dev/null 2>&1 || python3 -m ensurepip --user >/dev/null || \
		{ echo "python3 has no pip: install it (Debian: apt-get install python3-pip)" >&2; exit 1; }; \
	rm -rf .libtorch.partial && \
	python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
		--target .libtorch.partial $$packages && \
	touch .libtorch.partial/.complete-$$set && rm -rf .libtorch && mv .libtorch.partial .libtorch

build: setup
	cargo build --release

# The main job on a tiny model: the same command lines work on a real checkpoint and your own rows.
demo: build clean-demo
	$(BLOCKSTREAMER) synth qwen3-vl:tiny --out $(DEMO)/model
	$(BLOCKSTREAMER) train host/assets/demo.toml --model $(DEMO)/model --data host/assets/demo.jsonl --out $(DEMO)/run

# The same with pictures.
demo-images: build
	rm -rf $(DEMO_IMAGES)
	$(BLOCKSTREAMER) synth qwen3-vl:tiny --out $(DEMO_IMAGES)/model
	$(BLOCKSTREAMER) train host/assets/demo_images.toml --model $(DEMO_IMAGES)/model \
		--data host/assets/demo_images.jsonl --out $(DEMO_IMAGES)/run

clean-demo:
	rm -rf $(DEMO)

test: setup
	cargo test --workspace

check: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
