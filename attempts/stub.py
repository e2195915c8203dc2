import os, sys, types
root=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0,root)
m=types.ModuleType('foveate'); m.__path__=[root+'/foveate']; sys.modules['foveate']=m
