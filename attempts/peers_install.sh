# puts flash-attn-4 and FastVideo's Triton kernels under /tmp/site; source it
cat /tmp/parts/peers.part.00 .carry/peers2/peers.part.01 > /tmp/peers.tar && mkdir -p /tmp/w && tar -C /tmp/w -xf /tmp/peers.tar
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site /tmp/w/*.whl
cp -r /tmp/w/extra/fastvideo_kernel /tmp/site/
export PYTHONPATH=/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages:$PWD
