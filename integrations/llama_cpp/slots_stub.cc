#include "morphkv/llama_cpp/slots.h"
namespace morphkv::llama_cpp {
std::string Slots::save(int) const { throw EngineError("later"); }
void Slots::restore(int, std::string_view) { throw EngineError("later"); }
}
