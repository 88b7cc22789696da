from . import misc as misc
