timeout 110 python3 -m pytest -q -n 10 -p no:cacheprovider tests/gpu/test_gpu_attention.py 2>&1 | tail -40
cd .carry/k; timeout 80 python3 final.py 2>&1
timeout 60 compute-sanitizer --tool memcheck python3 sani.py 2>&1 | tail -6
