# What a test needs: the model's path in MORPHKV_TEST_MODEL, and the properties of its label.

if(NOT MORPHKV_TEST_MODEL AND MORPHKV_LLAMA_CPP)
  execute_process(
    COMMAND "${PROJECT_SOURCE_DIR}/scripts/setup" model
    OUTPUT_VARIABLE MORPHKV_TEST_MODEL OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "The tests need a model: see above why scripts/setup could not fetch it, "
      "or set MORPHKV_TEST_MODEL to a GGUF file, or switch MORPHKV_BUILD_TESTS off.")
  endif()
endif()

# Sets <out> to the properties of a test with this label. Tests of label `model` find the model's
# path in the environment variable MORPHKV_TEST_MODEL.
function(morphkv_test_properties label out)
  if(label STREQUAL "model")
    set(properties TIMEOUT 1800 ENVIRONMENT "MORPHKV_TEST_MODEL=${MORPHKV_TEST_MODEL}")
  elseif(label STREQUAL "package")
    set(properties TIMEOUT 300)
  elseif(label STREQUAL "python")
    set(properties TIMEOUT 1800)
  elseif(label STREQUAL "unit")
    set(properties TIMEOUT 120)
  else()
    message(FATAL_ERROR "No test label ${label}: use unit, model, python or package")
  endif()
  set(${out} LABELS ${label} ${properties} PARENT_SCOPE)
endfunction()
