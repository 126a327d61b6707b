// Which kernel serves a call.
#include "attention.h"

namespace story {

#ifdef ROUTE_TO_V1
namespace newest = v1;
#else
namespace newest = v2;
#endif

cudaError_t attend(const Args& args, Type type) {
  return type == Type::half ? newest::launch<__half>(args) : newest::launch<__nv_bfloat16>(args);
}

}  // namespace story
