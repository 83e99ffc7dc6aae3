from tests.pipeline.test_engine import *
def go(world):
    import time, torch
    torch.set_default_dtype(torch.float64)
    out=[]
    for c in (*CASES,*SEVERAL):
        a=time.process_time(); b=time.perf_counter(); compare(world,*c,(8,5,8)); out.append((c, round(time.process_time()-a,2), round(time.perf_counter()-b,2)))
    return out
def test_zz(run_ranks):
    for line in run_ranks(go,2)[0]: print(line)
